// Whether fork left the threads of this process behind.
#pragma once

namespace headrace {

// True in the child of a process that had other threads when it forked, and in that child's children. Fork copies the
// calling thread alone, and an OpenMP run-time that is not told waits forever for threads that it started before.
bool forked_from_threads();

}  // namespace headrace
