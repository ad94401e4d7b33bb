// A launch under way as its caller sees it, where one object (a station, a fleet) drives all
// flights of a backend. Dropping it leaves the flight to go on by itself.
#pragma once
#include <memory>
#include <utility>

#include "core/backend/backend.h"
#include "core/base/error.h"

namespace offcore {

template <typename Driver, typename Flight>
class FlightRun final : public Run {
 public:
  FlightRun(std::shared_ptr<Driver> driver, std::shared_ptr<Flight> flight)
      : driver_(std::move(driver)), flight_(std::move(flight)) {}

  bool done() override { return flight_->ended(); }
  void wait(const Deadline& deadline) override { driver_->wait(*flight_, deadline); }
  void hold(uintptr_t stream) override {
    if constexpr (requires { driver_->hold(*flight_, stream); }) {
      driver_->hold(*flight_, stream);
    } else {
      Run::hold(stream);
    }
  }
  Report report() const override {
    if (!flight_->ended()) {
      fail(Code::invalid, "a report exists only once the run is done: wait() first");
    }
    return flight_->report();
  }

 private:
  std::shared_ptr<Driver> driver_;
  std::shared_ptr<Flight> flight_;
};

}  // namespace offcore
