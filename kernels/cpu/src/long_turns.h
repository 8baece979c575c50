// How threads that compute for long share cores with those that wake for a moment and pass something on.
#pragma once
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace penstock {

// Asks for turns of 100 ms, the longest that Linux gives. It changes nobody's share: it lets whoever wakes with shorter
// turns go first at once, where a message would wait milliseconds for the end of this thread's turn. Linux before 6.12
// and other policies than the normal one ignore it. https://docs.kernel.org/scheduler/sched-eevdf.html
inline void take_long_turns() {
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns, deadline_ns, period_ns;
  } attributes{sizeof attributes, SCHED_OTHER, 0, getpriority(PRIO_PROCESS, 0), 0, 100'000'000, 0, 0};
  if (sched_getscheduler(0) == SCHED_OTHER) syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace penstock
