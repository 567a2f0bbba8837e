#!/usr/bin/env bash
# Fails where an ISA's object files hold a weak symbol that the linker could merge with another ISA's copy.
#
# usage: check_symbols.sh ISA OBJECT...
# A weak symbol must lie in the namespace of its ISA (its demangled name contains ::ISA::); templates and inline
# functions from anywhere else, the standard library's too, would be merged with the baseline's copies: AVX-512 code
# behind callers that never asked for it.
set -euo pipefail

isa=$1
shift
[ $# -gt 0 ] || { echo "check_symbols: no object files for $isa" >&2; exit 1; }

# DW.ref.__gxx_personality_v0 is a pointer to the exception handler, data without instructions.
weak=$(nm -C "$@" | awk '$2 ~ /^[WwVvu]$/ { sub(/^[^ ]+ [^ ]+ /, ""); print }' | grep -v '^DW\.ref\.' | sort -u || true)
total=$(printf '%s' "$weak" | grep -c . || true)
bad=$(printf '%s\n' "$weak" | grep -v -e "::$isa::" -e '^$' || true)
if [ -n "$bad" ]; then
    echo "$isa: weak symbols outside its namespace:"
    printf '%s\n' "$bad"
    exit 1
fi
echo "$isa: $# object files, $total weak symbols, all in ::$isa::"
