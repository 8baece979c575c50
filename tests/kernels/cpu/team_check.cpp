// Exercises the team of threads for a race detector: every loop reads what other threads wrote in the one before.
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "team.h"

using penstock::Member;
using penstock::Team;

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

void run(int size, int count, int rounds) {
  Team team(size);
  std::vector<int> values(count), sums(count);
  std::iota(values.begin(), values.end(), 0);
  long want = std::accumulate(values.begin(), values.end(), 0L);
  for (int round = 0; round < rounds; ++round) {
    int leaders = 0;
    team.start([&](Member& member) {
      if (member.leads()) ++leaders;
      for (int loop = 0; loop < 7; ++loop) {
        member.for_each(count, [&](int i) { sums[i] = values[i] + values[(i + 1) % count]; });
        member.for_each(0, [&](int) { check(false, "an item of none"); });
        member.for_each(count, [&](int i) { values[i] = sums[i] - values[i]; });
      }
    });
    team.join();
    check(leaders == 1, "not one leader");
    // Each loop turns the values by one place.
    check(std::accumulate(values.begin(), values.end(), 0L) == want, "an item was lost or done twice");
    for (int i = 0; i < count; ++i) check(values[i] == (i + 7 * (round + 1)) % count, "a loop began too early");
  }
}

}  // namespace

int main() {
  for (int size : {1, 2, 3, 5})
    for (int count : {1, 2, 64, 1000}) run(size, count, 20);
  for (int i = 0; i < 50; ++i) Team unused(3);
  std::puts("ok");
}
