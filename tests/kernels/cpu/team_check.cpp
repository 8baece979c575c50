// Exercises the team of threads for a race detector: every loop reads what other threads wrote in the one before.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "threads/team.h"

using penstock::Ranks;
using penstock::Team;
using penstock::Worker;

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

// Whether `ranks` gives the active threads the cores `active`, and the inactive ones the cores `inactive`.
bool has_cores(const Ranks& ranks, const std::vector<int>& active, const std::vector<int>& inactive) {
  std::vector<int> cores;
  for (int rank = 0; rank < ranks.size(); ++rank) cores.push_back(ranks.core(rank));
  std::sort(cores.begin(), cores.begin() + ranks.active());
  std::sort(cores.begin() + ranks.active(), cores.end());
  std::vector<int> want = active;
  want.insert(want.end(), inactive.begin(), inactive.end());
  return ranks.active() == (int)active.size() && cores == want;
}

void keep_best_cores() {
  Ranks ranks(4);
  check(has_cores(ranks, {0, 1, 2, 3}, {}), "each thread begins on a core of its own");
  ranks.shrink(3, {.98, .97, .97, .3});
  check(has_cores(ranks, {0, 1, 2}, {3}), "core 3 is lost");
  ranks.shrink(2, {.98, .97, .3});
  check(has_cores(ranks, {0, 1}, {2, 3}), "core 2 is lost later: core 3 is not used again");
  ranks.shrink(1, {.02, .97});
  check(has_cores(ranks, {1}, {0, 2, 3}) && ranks.thread(0) == 0, "the leader takes a free core from another thread");
  ranks.grow(4);
  check(has_cores(ranks, {0, 1, 2, 3}, {}), "all cores are back");
}

// A thread that becomes active while it measures its core would run a program twice.
void never_activate_by_shrinking(const Ranks& before, const std::vector<double>& truth) {
  std::vector<double> shares;
  for (int rank = 0; rank < before.active(); ++rank) shares.push_back(truth[before.core(rank)]);
  for (int count = 1; count < before.active(); ++count) {
    Ranks after = before;
    after.shrink(count, shares);
    check(after.thread(0) == 0, "another thread than the first leads");
    std::vector<int> were_active, threads;
    for (int rank = 0; rank < before.active(); ++rank) were_active.push_back(before.thread(rank));
    for (int rank = 0; rank < count; ++rank) {
      threads.push_back(after.thread(rank));
      const auto found = std::find(were_active.begin(), were_active.end(), after.thread(rank));
      check(found != were_active.end(), "a smaller team has a thread that was inactive");
      for (int other = count; other < before.active(); ++other) {
        check(truth[after.core(rank)] >= truth[after.core(other)], "a better core was left out");
      }
    }
    std::sort(threads.begin(), threads.end());
    check(std::unique(threads.begin(), threads.end()) == threads.end(), "a thread has two ranks");
    never_activate_by_shrinking(after, truth);
  }
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

// The threads whose parts a thread works on, in their order.
std::vector<int> victims_of(const Team& team, int index) {
  std::vector<int> victims;
  for (int k = 0; k < team.active(); ++k) victims.push_back(team.victim(index, k));
  return victims;
}

void steal_inside_a_node_first() {
  Team team(4);
  using List = std::vector<int>;
  check(victims_of(team, 1) == List{1, 2, 3, 0} && !team.spans_nodes(), "without nodes, parts follow one another");
  const int32_t one[] = {7, 7, 7, 7}, two[] = {0, 0, 1, 1}, mixed[] = {0, 1, 0, 1};
  team.set_nodes(one);
  check(victims_of(team, 1) == List{1, 2, 3, 0} && !team.spans_nodes(), "with one node, nothing changes");
  team.set_nodes(two);
  check(team.spans_nodes(), "two nodes");
  check(victims_of(team, 0) == List{0, 1, 2, 3} && victims_of(team, 1) == List{1, 0, 2, 3}, "the first node");
  check(victims_of(team, 2) == List{2, 3, 0, 1} && victims_of(team, 3) == List{3, 2, 0, 1}, "the second node");
  team.set_nodes(mixed);
  check(victims_of(team, 1) == List{1, 3, 2, 0}, "nodes that alternate");
  team.resize(3);
  check(victims_of(team, 1) == List{1, 2, 0} && victims_of(team, 2) == List{2, 0, 1}, "a smaller team");
  for (int size : {2, 5}) {
    Team divided(size);
    const int32_t nodes[] = {0, 0, 0, 1, 1}, halves[] = {0, 1};
    divided.set_nodes(size == 2 ? halves : nodes);
    for (int round = 0; round < 20; ++round) {
      std::vector<int> values(1000);
      divided.start([&](Worker& worker) {
        for (int loop = 0; loop < 7; ++loop) worker.for_each(1000, [&](int i) { values[i] += i; });
      });
      divided.join();
      for (int i = 0; i < 1000; ++i) check(values[i] == 7 * i, "an item was lost or done twice on two nodes");
      divided.resize(1 + round % size);
    }
  }
}

}  // namespace

int main() {
  steal_inside_a_node_first();
  choose_sizes();
  keep_best_cores();
  std::vector<double> truth = {.1, .2, .3, .4, .5};
  do never_activate_by_shrinking(Ranks(5), truth);
  while (std::next_permutation(truth.begin(), truth.end()));
  crowd();
  for (int size : {1, 2, 3, 5})
    for (int count : {1, 2, 64, 1000}) run(size, count, 20);
  for (int i = 0; i < 50; ++i) Team unused(3);
  std::puts("ok");
}
