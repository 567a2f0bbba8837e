// The ISA that a kernel file is compiled for: HEADRACE_ISA names it and its namespace, a header per ISA the rest.
#pragma once

#ifndef HEADRACE_ISA
#error "kernel files are compiled once per ISA with HEADRACE_ISA defined (cmake/isa.cmake)"
#endif

#define HEADRACE_STRING_(x) #x
#define HEADRACE_STRING(x) HEADRACE_STRING_(x)
#define HEADRACE_ISA_HEADER_(x) cpu/isa/x.hpp
#define HEADRACE_ISA_HEADER(x) HEADRACE_STRING(HEADRACE_ISA_HEADER_(x))
#include HEADRACE_STRING(HEADRACE_ISA_HEADER_(HEADRACE_ISA))
