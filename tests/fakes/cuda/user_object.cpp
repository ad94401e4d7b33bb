#include "tests/fakes/cuda/user_object.h"

#include <chrono>
#include <random>
#include <thread>

#include "tests/fakes/cuda/seen.h"
#include "tests/fakes/cuda/settings.h"

namespace fakecuda {
namespace {

std::atomic<uint64_t> live{0};
thread_local bool destroying = false;

void destroy_later(void* value, HostFunction destroy) {
  static std::atomic<uint64_t> destroyed{0};
  std::mt19937_64 random(settings().seed + destroyed++);
  const auto delay = std::chrono::microseconds(settings().seed == 0 ? 0 : random() % 1000);
  const Shown shown;
  std::thread([=] {
    std::this_thread::sleep_for(delay);
    destroying = true;
    destroy(value);
    --live;
  }).detach();
}

}  // namespace

UserObject::UserObject(void* value, HostFunction destroy, uint64_t count)
    : value_(value), destroy_(destroy), count_(count) {
  ++live;
}

void UserObject::release(uint64_t count) {
  uint64_t had = count_;
  do {
    require(had >= count, kInvalidValue);
  } while (!count_.compare_exchange_weak(had, had - count));
  if (had != count) return;
  user_objects().remove_if([this](const UserObject& object) { return &object == this; });
  destroy_later(value_, destroy_);
}

Registry<UserObject, UserObjectHandle>& user_objects() {
  static auto* const value = new Registry<UserObject, UserObjectHandle>(7, kInvalidValue);
  return *value;
}

uint64_t live_user_objects() { return live; }

bool in_destructor() { return destroying; }

}  // namespace fakecuda
