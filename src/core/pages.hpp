// pages: asks the system for huge pages behind large blocks that a call is about to write.
#pragma once

#include "core/views.hpp"

namespace headrace {

// Asks for the whole huge pages inside a block of 4 MiB or more. Fresh memory then costs one fault in 2 MiB instead of
// 512, and rows that lie far apart share entries of the address translation. Changes no contents; does nothing where
// the system has no such pages.
void ask_for_huge_pages(void* data, std::size_t bytes);

// The same for an output with gaps of up to 15/16 of its memory: those of some heads of a tensor, whose others a next
// call writes.
void ask_for_huge_pages(const TensorView& output);

}  // namespace headrace
