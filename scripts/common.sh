# What test.sh and demo.sh share: messages, missing Debian or Ubuntu packages, the Python environment.

say() { printf '\n== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "cannot run '$*': become root or install sudo"
    fi
}

is_installed() { [ "$(dpkg-query -W -f '${Status}' "$1" 2>/dev/null)" = "install ok installed" ]; }

# install_missing PACKAGE...: installs those that are not there yet, without a question; touches nothing if all are.
install_missing() {
    command -v dpkg-query >/dev/null && command -v apt-get >/dev/null ||
        die "this script installs packages with apt-get, which only Debian and Ubuntu have; needed: $*"
    local missing=() package
    for package in "$@"; do is_installed "$package" || missing+=("$package"); done
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing ${missing[*]}"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq </dev/null || die "apt-get update failed"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
        </dev/null >/dev/null || die "apt-get could not install ${missing[*]}"
}

build_packages=(build-essential cmake ninja-build ccache libcli11-dev nlohmann-json3-dev)
python_packages=(python3 python3-dev python3-venv)
jobs=$(nproc)

# The Python environment that both use: `python3 -m venv "$venv"` makes it, or leaves it as it is.
venv=build/venv
pip_install() { "$venv/bin/python" -m pip install --progress-bar off "$@"; }
