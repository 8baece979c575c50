// Sets how long a thread may compute before Linux runs another one.
#pragma once
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace penstock {

// The longest slice that Linux grants. The length of a slice does not change a thread's share of the core. But a
// thread that wakes with a shorter slice preempts one with a longer slice at once. Without that, the thread that
// handles a message would wait milliseconds for the end of this thread's slice.
constexpr uint64_t kLongSliceNs = 100'000'000;

// Linux's default slice. On a core where another process computes all the time, a thread that wakes must not have a
// longer slice than that process. It would wait for the end of the other slice at every barrier.
constexpr uint64_t kDefaultSliceNs = 0;

// Requests a time slice for a thread of this process. Linux before 6.12 ignores the request, and so do scheduling
// policies other than the normal one. https://docs.kernel.org/scheduler/sched-eevdf.html
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
