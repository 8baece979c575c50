// How long a thread may compute before the scheduler looks for another one.
#pragma once
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace penstock {

// The longest slice that Linux gives. It changes no thread's share of the core. It lets any thread that wakes up with a
// shorter slice run first at once, where a message would otherwise wait milliseconds for the end of this thread's slice.
constexpr uint64_t kLongSliceNs = 100'000'000;

// The system's own slice. Beside threads that compute all the time, a thread that wakes up must not have a longer slice
// than theirs: it would wait for the end of their slice at every barrier.
constexpr uint64_t kDefaultSliceNs = 0;

// Requests a time slice for a thread of this process. Linux before 6.12 and other scheduling policies than the normal one
// ignore it. https://docs.kernel.org/scheduler/sched-eevdf.html
inline void request_time_slice(pid_t thread, uint64_t slice_ns) {
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns, deadline_ns, period_ns;
  } attributes{sizeof attributes, SCHED_OTHER, 0, getpriority(PRIO_PROCESS, thread), 0, slice_ns, 0, 0};
  if (sched_getscheduler(thread) == SCHED_OTHER) syscall(SYS_sched_setattr, thread, &attributes, 0);
}

}  // namespace penstock
