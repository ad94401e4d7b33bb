// The real libnccl: found once, at the first call of anything.
//
// It is what OFFCORE_NCCL_LIBRARY names; else what comes behind the shim in the order in which the
// loader looks symbols up (LD_PRELOAD); else the libnccl.so.2 that the process has loaded, or that
// the loader finds; else the one of NVIDIA's package, if that is installed beside ours.
#pragma once
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "shim/nccl.h"

namespace offcore::shim {

// A trampoline's: where it leads, and whose name it bears.
struct Slot {
  void* target;
  const char* name;
};

// While the thread is in the real library, which may call itself by its own names: these lead here.
inline thread_local bool inside = false;
struct Inside {
  bool outer = std::exchange(inside, true);
  ~Inside() { inside = outer; }
};

// One line on stderr.
void tell(const std::string& text);

class Library {
 public:
  static Library& of_process();

  bool loaded() const { return refusal_.empty(); }
  // Null where the library is missing, or does not have it: says so on stderr, once a name.
  void* find(const char* name);
  const std::string& path() const { return path_; }
  int version() const { return version_; }  // 22809 for 2.28.9; 0: not loaded

#define OFFCORE_NCCL_MEMBER(name, parameters) \
  NcclResult(*name) parameters = nullptr; /* null: missing */
  OFFCORE_NCCL_CALLED(OFFCORE_NCCL_MEMBER)
#undef OFFCORE_NCCL_MEMBER

 private:
  Library();
  void open();
  bool take(void* handle);

  void* handle_ = nullptr;
  std::string path_;
  std::string refusal_;
  int version_ = 0;
  std::mutex mutex_;
  std::set<std::string> told_;
};

}  // namespace offcore::shim
