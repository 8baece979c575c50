// Preloaded into a Redis server: notes how much of each file the disk has, one line "<inode> <bytes>" for each sync.
//
// The size is read before the sync, so what is written meanwhile does not count. SYNCED_FILES names the file with the
// notes, SYNC_US how long each sync takes longer, in microseconds.

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace {

int synced(long call, int file) {
  struct stat before = {};
  const bool is_known = fstat(file, &before) == 0;
  if (const char* slower = std::getenv("SYNC_US")) {
    usleep(static_cast<useconds_t>(std::atoi(slower)));
  }
  const long failed = syscall(call, file);
  const char* notes = std::getenv("SYNCED_FILES");
  if (failed == 0 && is_known && S_ISREG(before.st_mode) && notes != nullptr) {
    const int log = open(notes, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    char line[64];
    const int size = std::snprintf(line, sizeof line, "%lu %lld\n", static_cast<unsigned long>(before.st_ino),
                                   static_cast<long long>(before.st_size));
    if (log < 0 || write(log, line, static_cast<size_t>(size)) != size) {
      std::abort();
    }
    close(log);
  }
  return static_cast<int>(failed);
}

}  // namespace

extern "C" int fsync(int file) { return synced(SYS_fsync, file); }
extern "C" int fdatasync(int file) { return synced(SYS_fdatasync, file); }
