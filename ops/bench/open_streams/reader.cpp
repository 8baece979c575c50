// Holds thousands of streams open, counts their events, and measures when they arrive.
//
//   reader HOST PORT REQUEST_FILE STREAMS AT_ONCE [FRAME_FILE]
//
// Opens STREAMS connections, AT_ONCE at a time, and sends the file's bytes on each. With FRAME_FILE, each one becomes a
// WebSocket, and the bytes of that file follow its handshake. An event's text holds a stamp
// `@@<time>:<index>;`: the publication's time in ns on CLOCK_MONOTONIC, and the event's place in its stream. A stream
// is open once its first event has come. Each answer on stdout is one line of JSON. Commands on stdin, one per line:
//
//   measure FROM_NS UNTIL_NS   record the events published in this interval, until 1 s after it
//   stop COUNT                 read no more from the first COUNT streams; their sockets stay open
//
// It looks for events every 0.5 ms, so an arrival may be noticed that much too late. If each event woke this process,
// the gateway would pay for the wake-up, which it does not over a network.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr int64_t kNsPerUs = 1000;
constexpr int64_t kPauseNs = 500'000;
constexpr int64_t kGraceNs = 1'000'000'000;
constexpr size_t kReadBytes = 1 << 16;
constexpr int kMaxReady = 512;
constexpr int kStoppedReceiveBytes = 4096;
constexpr int kClose = 8, kPing = 9;  // Codes of WebSocket frames.

int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "reader: %s: %s\n", what, std::strerror(errno));
  std::exit(1);
}

struct Stream {
  int socket = -1;
  bool stopped = false;
  bool is_websocket = false;
  int64_t next_index = 0;
  int64_t last_arrival_ns = 0;
  std::string rest;  // The beginning of an event whose end has not arrived.
};

struct Interval {
  int64_t from_ns = 0, until_ns = 0;
  size_t events = 0, arrived = 0, bytes = 0;
  std::vector<uint32_t> latencies_us, gaps_us;
};

class Reader {
 public:
  // frame: the first frame of a WebSocket; empty for server-sent events.
  Reader(sockaddr_in address, std::string request, std::string frame, size_t streams)
      : address_(address),
        request_(std::move(request)),
        frame_(std::move(frame)),
        mark_(frame_.empty() ? "data: {" : "\"data\":{"),
        streams_(streams),
        epoll_(epoll_create1(0)) {}

  void open_all(size_t at_once) {
    for (size_t started = 0; num_open_ < streams_.size();) {
      while (started < streams_.size() && started - num_open_ < at_once) open(started++);
      poll(100);
      if (num_closed_) fail(("a stream ended while the others opened, after: " + last_closed_).c_str());
    }
    std::printf("{\"open\": %zu}\n", num_open_);
    std::fflush(stdout);
  }

  void stop(size_t count) {
    for (size_t i = 0; i < std::min(count, streams_.size()); ++i) {
      Stream& stream = streams_[i];
      epoll_ctl(epoll_, EPOLL_CTL_DEL, stream.socket, nullptr);
      int bytes = kStoppedReceiveBytes;
      setsockopt(stream.socket, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
      stream.stopped = true;
    }
    std::printf("{\"stopped\": %zu}\n", count);
    std::fflush(stdout);
  }

  void measure(int64_t from_ns, int64_t until_ns) {
    interval_ = Interval{};
    interval_.from_ns = from_ns;
    interval_.until_ns = until_ns;
    while (now_ns() < until_ns + kGraceNs) {
      poll(0);
      timespec pause{0, kPauseNs};
      nanosleep(&pause, nullptr);
    }
    report();
  }

  // Reads on between two commands, so that no stream is stopped by accident.
  void poll(int timeout_ms) {
    epoll_event ready[kMaxReady];
    int count;
    do {
      count = epoll_wait(epoll_, ready, kMaxReady, timeout_ms);
      for (int i = 0; i < count; ++i) {
        if (ready[i].data.u64 == kStdin) has_command_ = true;
        else receive(streams_[ready[i].data.u64]);
      }
    } while (count == kMaxReady);
  }

  void wait_for_command() {
    has_command_ = false;
    watch(STDIN_FILENO, kStdin);
    while (!has_command_) poll(1000);
    epoll_ctl(epoll_, EPOLL_CTL_DEL, STDIN_FILENO, nullptr);
  }

 private:
  static constexpr uint64_t kStdin = UINT64_MAX;

  void watch(int descriptor, uint64_t id) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = id;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, descriptor, &event) < 0) fail("epoll_ctl");
  }

  void open(size_t id) {
    int one = 1, descriptor = socket(AF_INET, SOCK_STREAM, 0);
    if (descriptor < 0) fail("socket");
    if (connect(descriptor, reinterpret_cast<sockaddr*>(&address_), sizeof address_) < 0) fail("connect");
    setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    send_all(descriptor, request_);
    fcntl(descriptor, F_SETFL, O_NONBLOCK);
    streams_[id].socket = descriptor;
    watch(descriptor, id);
  }

  static void send_all(int descriptor, const std::string& bytes) {
    if (send(descriptor, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) fail("send");
  }

  void receive(Stream& stream) {
    ssize_t size = recv(stream.socket, buffer_ + kReadBytes, kReadBytes, 0);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (size <= 0) {
      ++num_closed_;
      last_closed_ = stream.rest;
      close(stream.socket);
      return;
    }
    int64_t at_ns = now_ns();
    if (at_ns >= interval_.from_ns && at_ns < interval_.until_ns) interval_.bytes += size;
    // What was left over is put in front of what came.
    if (stream.rest.size() > kReadBytes) fail("an event is too long");
    char* begin = buffer_ + kReadBytes - stream.rest.size();
    std::memcpy(begin, stream.rest.data(), stream.rest.size());
    std::string_view data(begin, stream.rest.size() + size);
    if (frame_.empty()) take_events(stream, data, at_ns);
    else if (stream.is_websocket || shakes_hands(stream, data)) take_frames(stream, data, at_ns);
    stream.rest = data;
  }

  // An event of an SSE stream ends with an empty line.
  void take_events(Stream& stream, std::string_view& data, int64_t at_ns) {
    for (size_t end; (end = data.find("\n\n")) != data.npos; data.remove_prefix(end + 2))
      count(stream, data.substr(0, end), at_ns);
  }

  // Whether the answer to the handshake is complete. The first frame follows it.
  bool shakes_hands(Stream& stream, std::string_view& data) {
    size_t end = data.find("\r\n\r\n");
    if (end == data.npos) return false;
    if (!data.starts_with("HTTP/1.1 101 ")) fail("the WebSocket was refused");
    data.remove_prefix(end + 4);
    send_all(stream.socket, frame_);
    return stream.is_websocket = true;
  }

  // RFC 6455, 5.2: a server's frames have no mask. Each message of this server is one frame.
  void take_frames(Stream& stream, std::string_view& data, int64_t at_ns) {
    while (data.size() >= 2) {
      size_t size = data[1] & 127, head = size == 127 ? 10 : size == 126 ? 4 : 2;
      if (data.size() < head) return;
      if (head > 2) {
        size = 0;
        for (size_t at = 2; at < head; ++at) size = size << 8 | static_cast<uint8_t>(data[at]);
      }
      if (data.size() < head + size) return;
      std::string_view payload = data.substr(head, size);
      if (int code = data[0] & 15; code == kPing)
        send_all(stream.socket, std::string("\x8A") + char(0x80 | size) + std::string(4, 0) + std::string(payload));
      else if (code == kClose) fail("the server closed a WebSocket");
      else count(stream, payload, at_ns);
      data.remove_prefix(head + size);
    }
  }

  void count(Stream& stream, std::string_view event, int64_t at_ns) {
    size_t at = event.find(mark_);
    if (at == event.npos || (at = event.find("@@", at)) == event.npos) return;
    char* end = nullptr;
    int64_t published_ns = std::strtoll(event.data() + at + 2, &end, 10);
    int64_t index = std::strtoll(end + 1, nullptr, 10);
    num_wrong_ += index != stream.next_index;
    num_open_ += stream.next_index == 0;
    stream.next_index = index + 1;
    bool is_inside = at_ns >= interval_.from_ns && at_ns < interval_.until_ns;
    interval_.arrived += is_inside;
    if (published_ns >= interval_.from_ns && published_ns < interval_.until_ns) {
      ++interval_.events;
      interval_.latencies_us.push_back((at_ns - published_ns) / kNsPerUs);
    }
    if (is_inside && stream.last_arrival_ns >= interval_.from_ns && !stream.stopped)
      interval_.gaps_us.push_back((at_ns - stream.last_arrival_ns) / kNsPerUs);
    stream.last_arrival_ns = at_ns;
  }

  static void print_percentiles(const char* name, std::vector<uint32_t>& values) {
    std::sort(values.begin(), values.end());
    auto of = [&](double share) {
      return values.empty() ? 0.0 : values[static_cast<size_t>((values.size() - 1) * share)] / 1000.0;
    };
    std::printf("\"%s_p50_ms\": %.3f, \"%s_p90_ms\": %.3f, \"%s_p99_ms\": %.3f, \"%s_max_ms\": %.3f, ", name, of(.5),
                name, of(.9), name, of(.99), name, of(1));
  }

  void report() {
    std::printf("{");
    print_percentiles("latency", interval_.latencies_us);
    print_percentiles("gap", interval_.gaps_us);
    double seconds = (interval_.until_ns - interval_.from_ns) / 1e9;
    std::printf("\"num_events\": %zu, \"events_per_s\": %.1f, \"bytes_per_event\": %.1f, ", interval_.events,
                interval_.arrived / seconds, interval_.arrived ? double(interval_.bytes) / interval_.arrived : 0);
    std::printf("\"num_closed\": %zu, \"num_wrong\": %zu}\n", num_closed_, num_wrong_);
    std::fflush(stdout);
  }

  sockaddr_in address_;
  std::string request_, frame_, mark_;
  std::vector<Stream> streams_;
  int epoll_;
  Interval interval_;
  size_t num_open_ = 0, num_closed_ = 0, num_wrong_ = 0;
  std::string last_closed_;  // What the last stream that closed had left over: a refusal, or an event without an end.
  bool has_command_ = false;
  char buffer_[2 * kReadBytes];
};

std::string content_of(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6 && argc != 7) {
    std::fprintf(stderr, "usage: reader HOST PORT REQUEST_FILE STREAMS AT_ONCE [FRAME_FILE]\n");
    return 2;
  }
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(std::atoi(argv[2]));
  if (inet_pton(AF_INET, argv[1], &address.sin_addr) != 1) fail("the address");
  std::string frame = argc == 7 ? content_of(argv[6]) : "";
  static Reader* reader = new Reader(address, content_of(argv[3]), frame, std::strtoull(argv[4], nullptr, 10));
  reader->open_all(std::strtoull(argv[5], nullptr, 10));
  char line[256];
  while (true) {
    reader->wait_for_command();
    if (!std::fgets(line, sizeof line, stdin)) return 0;
    long long from_ns = 0, until_ns = 0;
    size_t count = 0;
    if (std::sscanf(line, "measure %lld %lld", &from_ns, &until_ns) == 2) reader->measure(from_ns, until_ns);
    else if (std::sscanf(line, "stop %zu", &count) == 1) reader->stop(count);
    else fail("an unknown command");
  }
}
