// What the machine's cores reach together: reading memory, and the products of bfloat16 and of 8-bit integers.
//
// Usage: ceilings [--read] CORE...   Prints one JSON object. Each number is the best of several passes, in units of 1e9
// per second: bytes read; operations in bfloat16 and in int8 (a multiplication and an addition are two). With --read,
// only bytes are measured, which takes a second.
#include <immintrin.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

namespace {

// Far more than any last-level cache holds.
constexpr size_t kBytes = size_t{768} << 20;
constexpr int kPasses = 12;
constexpr long kRounds = 4'000'000;
constexpr size_t kSums = 16;
constexpr int kLine = 64;
// Operations of one 512-bit instruction.
constexpr double kBf16Operations = 64;
constexpr double kInt8Operations = 128;

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Runs `work` on all cores at once, `passes` times; the seconds of the fastest pass.
double fastest(const std::vector<int>& cores, int passes, const std::function<void(size_t)>& work) {
  std::barrier barrier(static_cast<long>(cores.size()));
  std::vector<double> starts(passes * cores.size()), ends(starts);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < cores.size(); ++i) {
    threads.emplace_back([&, i] {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(cores[i], &set);
      sched_setaffinity(0, sizeof set, &set);
      for (int pass = 0; pass < passes; ++pass) {
        const size_t at = pass * cores.size() + i;
        barrier.arrive_and_wait();
        starts[at] = seconds();
        work(i);
        ends[at] = seconds();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  double best = 1e9;
  for (size_t at = 0; at < starts.size(); at += cores.size()) {
    // From the first core's start to the last one's end.
    auto first = std::min_element(starts.begin() + at, starts.begin() + at + cores.size());
    best = std::min(best, *std::max_element(ends.begin() + at, ends.begin() + at + cores.size()) - *first);
  }
  return best;
}

// Reads in several places at once, so that the hardware's prefetchers of all of them work.
uint64_t read_all(const char* data, size_t bytes, int streams, int ahead) {
  __m512i sums[4] = {};
  const size_t part = bytes / streams / kLine * kLine;
  for (size_t at = 0; at + 4 * kLine <= part; at += 4 * kLine) {
    for (int s = 0; s < streams; ++s) {
      const char* from = data + s * part + at;
      for (int k = 0; k < 4; ++k) {
        if (ahead) _mm_prefetch(from + ahead + k * kLine, _MM_HINT_T0);
        sums[k] = _mm512_xor_si512(sums[k], _mm512_load_si512(from + k * kLine));
      }
    }
  }
  __m512i sum = _mm512_xor_si512(_mm512_xor_si512(sums[0], sums[1]), _mm512_xor_si512(sums[2], sums[3]));
  return _mm512_reduce_add_epi64(sum);
}

double bytes_per_s(const std::vector<int>& cores, std::atomic<uint64_t>& sink) {
  void* mapped = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) std::exit(1);
  madvise(mapped, kBytes, MADV_HUGEPAGE);
  char* data = static_cast<char*>(mapped);
  const size_t share = kBytes / cores.size() / 4096 * 4096;
  fastest(cores, 1, [&](size_t i) { std::fill_n(data + i * share, share, char(i + 1)); });
  double best = 0;
  for (int streams : {1, 2, 4}) {
    for (int ahead : {0, 1024, 4096}) {
      double s =
          fastest(cores, kPasses / 3, [&](size_t i) { sink += read_all(data + i * share, share, streams, ahead); });
      best = std::max(best, share * cores.size() / s);
    }
  }
  munmap(mapped, kBytes);
  return best;
}

// Enough independent sums to hide the latency, each in a register of its own: `K` are constants.
template <size_t... K>
uint64_t bf16_products(__m512i factors, std::index_sequence<K...>) {
  __m512i sums[sizeof...(K)] = {};
  for (long round = 0; round < kRounds; ++round) {
    ([&] { asm volatile("vdpbf16ps %1, %1, %0" : "+v"(sums[K]) : "v"(factors)); }(), ...);
  }
  return (static_cast<uint64_t>(_mm512_reduce_add_epi64(sums[K])) + ...);
}

template <size_t... K>
uint64_t int8_products(__m512i factors, std::index_sequence<K...>) {
  __m512i sums[sizeof...(K)] = {};
  for (long round = 0; round < kRounds; ++round) {
    ([&] { asm volatile("vpdpbusd %1, %1, %0" : "+v"(sums[K]) : "v"(factors)); }(), ...);
  }
  return (static_cast<uint64_t>(_mm512_reduce_add_epi64(sums[K])) + ...);
}

double bf16_per_s(const std::vector<int>& cores, std::atomic<uint64_t>& sink) {
  double s = fastest(cores, kPasses, [&](size_t i) {
    sink += bf16_products(_mm512_set1_epi16(static_cast<short>(i + 1)), std::make_index_sequence<kSums>());
  });
  return kBf16Operations * kSums * kRounds * cores.size() / s;
}

double int8_per_s(const std::vector<int>& cores, std::atomic<uint64_t>& sink) {
  double s = fastest(cores, kPasses, [&](size_t i) {
    sink += int8_products(_mm512_set1_epi8(static_cast<char>(i + 1)), std::make_index_sequence<kSums>());
  });
  return kInt8Operations * kSums * kRounds * cores.size() / s;
}

}  // namespace

int main(int count, char** words) {
  const bool only_reads = count > 1 && std::strcmp(words[1], "--read") == 0;
  std::vector<int> cores;
  for (int i = only_reads ? 2 : 1; i < count; ++i) cores.push_back(std::atoi(words[i]));
  std::atomic<uint64_t> sink{0};
  std::printf("{\"read_gb_per_s\": %.2f", bytes_per_s(cores, sink) / 1e9);
  if (!only_reads) {
    double bf16 = bf16_per_s(cores, sink), int8 = int8_per_s(cores, sink);
    std::printf(", \"bf16_gop_per_s\": %.1f, \"int8_gop_per_s\": %.1f", bf16 / 1e9, int8 / 1e9);
  }
  std::printf("}\n");
  std::fprintf(stderr, "%llu\n", static_cast<unsigned long long>(sink.load()));
}
