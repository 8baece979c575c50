// Exercises the team of threads for a race detector: every loop reads what other threads wrote in the one before.
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "threads/team.h"

using penstock::Worker;
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
    team.start([&](Worker& worker) {
      if (worker.leads()) ++leaders;
      for (int loop = 0; loop < 7; ++loop) {
        worker.for_each(count, [&](int i) { sums[i] = values[i] + values[(i + 1) % count]; });
        worker.for_each(0, [&](int) { check(false, "an item of none"); });
        worker.for_each(count, [&](int i) { values[i] = sums[i] - values[i]; });
      }
    });
    team.join();
    // Every program runs on another number of threads, as after cores were lost or came back.
    team.resize(1 + round % size);
    check(team.active() == 1 + round % size, "another number of threads");
    check(leaders == 1, "not one leader");
    // Each loop turns the values by one place.
    check(std::accumulate(values.begin(), values.end(), 0L) == want, "an item was lost or done twice");
    for (int i = 0; i < count; ++i) check(values[i] == (i + 7 * (round + 1)) % count, "a loop began too early");
  }
}

void choose_sizes() {
  using penstock::best_team_size;
  check(best_team_size({1, 1, 1, 1}) == 4, "all cores are free");
  check(best_team_size({.5, .5}) == 2, "a busy loop on each core: half of both is more than half of one");
  check(best_team_size({1, .5}) == 2, "one busy loop: no gain without its core");
  check(best_team_size({1, .02}) == 1, "a lost core");
  check(best_team_size({.02, 1}) == 1, "the leader's core is the lost one");
  check(best_team_size({1, 1, .1, 1, .1, 1, 1, 1}) == 6, "two lost cores of eight");
  check(best_team_size({.01}) == 1, "one thread is the least");
}

// More threads than cores: they get a part of their cores only, and still end every program.
void crowd() {
  Team team(16);
  int sum = 0;
  for (int round = 0; round < 20; ++round) {
    std::vector<int> values(4000);
    team.start([&](Worker& worker) {
      for (int loop = 0; loop < 30; ++loop) worker.for_each(4000, [&](int i) { values[i] += i % 7; });
    });
    team.join();
    sum += std::accumulate(values.begin(), values.end(), 0) == 30 * 11994 ? 1 : 0;
  }
  check(sum == 20, "an item was lost or done twice in a crowd");
}

}  // namespace

int main() {
  choose_sizes();
  crowd();
  for (int size : {1, 2, 3, 5})
    for (int count : {1, 2, 64, 1000}) run(size, count, 20);
  for (int i = 0; i < 50; ++i) Team unused(3);
  std::puts("ok");
}
