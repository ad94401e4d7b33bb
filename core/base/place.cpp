#include "core/base/place.h"

#include <sys/stat.h>

#include <fstream>
#include <string>

#include "core/base/digest.h"

namespace offcore {

uint64_t place_here() {
  Digest digest;
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  digest.add(boot);
  struct stat here{};
  if (stat("/proc/thread-self/ns/net", &here) == 0) {
    digest.add(static_cast<uint64_t>(here.st_ino));
    digest.add(static_cast<uint64_t>(here.st_dev));
  }
  return digest.value();
}

}  // namespace offcore
