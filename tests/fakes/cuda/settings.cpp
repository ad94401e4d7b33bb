#include "tests/fakes/cuda/settings.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <sstream>

namespace fakecuda {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// The number at the start of `text`, or `fallback` where there is none.
uint64_t number(const std::string& text, uint64_t fallback, std::string* rest = nullptr) {
  uint64_t value = fallback;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (rest) *rest = std::string(end, text.data() + text.size());
  return error == std::errc() ? value : fallback;
}

uint64_t bytes(const std::string& text, uint64_t fallback) {
  std::string unit;
  const uint64_t value = number(text, fallback, &unit);
  if (unit == "K") return value << 10;
  if (unit == "M") return value << 20;
  if (unit == "G") return value << 30;
  return value;
}

// As the driver reads it: ordinals up to the first one that is not there.
std::vector<int> visible_devices(int count) {
  std::vector<int> devices;
  if (!std::getenv("CUDA_VISIBLE_DEVICES")) {
    for (int i = 0; i < count; ++i) devices.push_back(i);
    return devices;
  }
  for (const auto& part : split(variable("CUDA_VISIBLE_DEVICES"), ',')) {
    std::string rest;
    const uint64_t device = number(part, UINT64_MAX, &rest);
    const bool known = device < static_cast<uint64_t>(count) && rest.empty();
    if (!known || std::ranges::count(devices, static_cast<int>(device))) break;
    devices.push_back(static_cast<int>(device));
  }
  return devices;
}

Settings read() {
  Settings out;
  out.driver = static_cast<int>(number(variable("OFFCORE_FAKE_CUDA_DRIVER"), out.driver));
  out.devices = visible_devices(static_cast<int>(number(variable("OFFCORE_FAKE_CUDA_DEVICES"), 4)));
  out.mig = variable("OFFCORE_FAKE_CUDA_MIG") == "1";
  out.loose = variable("OFFCORE_FAKE_CUDA_LOOSE") == "1";
  out.strided_right = number(variable("OFFCORE_FAKE_CUDA_STRIDED_RIGHT"), out.strided_right);
  if (const auto name = variable("OFFCORE_FAKE_CUDA_NAME"); !name.empty()) out.name = name;
  if (out.mig) {  // a process sees one instance, and it has no peers
    out.name += " MIG 1g.18gb";
    out.devices.resize(std::min<size_t>(out.devices.size(), 1));
  }
  out.memory_bytes = bytes(variable("OFFCORE_FAKE_CUDA_MEMORY"), out.memory_bytes);
  out.pinned_bytes = bytes(variable("OFFCORE_FAKE_CUDA_PINNED"), out.pinned_bytes);
  out.seed = number(variable("OFFCORE_FAKE_CUDA_SEED"), out.seed);
  out.serial_graphs = variable("OFFCORE_FAKE_CUDA_GRAPHS") == "serial";
  out.lacks = split(variable("OFFCORE_FAKE_CUDA_LACKS"), ',');
  out.queue_depth = number(variable("OFFCORE_FAKE_CUDA_QUEUE_DEPTH"), out.queue_depth);
  const auto no_peer = variable("OFFCORE_FAKE_CUDA_NO_PEER");
  out.all_peers = no_peer != "1";
  for (const auto& part : split(no_peer, ',')) {
    std::string rest;
    const auto first = static_cast<int>(number(part, 0, &rest));
    if (rest.size() < 2 || rest[0] != '-') continue;
    out.no_peers.emplace_back(first, static_cast<int>(number(rest.substr(1), 0)));
  }
  for (const auto& part : split(variable("OFFCORE_FAKE_CUDA_FAIL"), ',')) {
    const auto fields = split(part, ':');
    if (fields.size() < 2) continue;
    const uint64_t code = fields.size() > 2 ? number(fields[2], 2) : 2;
    out.faults.push_back({fields[0], number(fields[1], 0), static_cast<int>(code)});
  }
  return out;
}

}  // namespace

bool Settings::peers(int a, int b) const {
  const auto is_pair = [&](const auto& pair) {
    return pair == std::pair(a, b) || pair == std::pair(b, a);
  };
  return all_peers && !mig && std::ranges::none_of(no_peers, is_pair);
}

const Settings& settings() {
  static const Settings* const value = new Settings(read());  // outlives the streams' threads
  return *value;
}

}  // namespace fakecuda
