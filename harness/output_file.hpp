// Output files: a regular file becomes the old or the whole new one; anything else is written into.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "headrace/status.hpp"

namespace headrace::harness {

// Appends bytes to the file being written. After a failure it does nothing.
using Append = std::function<void(const void* data, std::size_t bytes)>;

// Puts what `fill` appends in `path`. Symbolic links are followed; what they lead to is written, the links stay. Where
// a regular file or nothing stands, a temporary file in the same folder is renamed over it: its mode is kept, and a
// failure or a signal leaves the old file and no temporary one. A device, a FIFO, or an open file named as /dev/stdout
// or /dev/fd/N is written into. A folder, a socket and a file without write permission are refused. Errors start with
// the path.
Status write_file(const std::string& path, const std::function<void(const Append&)>& fill);

Status write_text_file(const std::string& path, const std::string& text);

// Whether write_file could begin, as far as can be known without writing: for long commands that write at their end.
Status can_write(const std::string& path);

}  // namespace headrace::harness
