// Bootstraps; and the rendezvous, for tests: communicators join theirs inside the core.
#include "core/window/rendezvous.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <mutex>

#include "bytes.h"
#include "core/base/error.h"
#include "module.h"
#include "process.h"
#include "released.h"

namespace offcore {
namespace {

// A rendezvous, and the peers whose processes have died.
class Meeting : public OfProcess {
 public:
  Meeting(const Bootstrap& bootstrap, const Deadline& deadline)
      : OfProcess("the rendezvous"), rendezvous_(Rendezvous::join(bootstrap, deadline)) {
    rendezvous_->on_peer_loss([this](Rank peer) {
      const std::lock_guard lock(mutex_);
      lost_.push_back(peer);
    });
  }
  ~Meeting() { rendezvous_->on_peer_loss(nullptr); }

  Rendezvous& rendezvous() const { return *rendezvous_; }
  std::vector<Rank> lost() const {
    const std::lock_guard lock(mutex_);
    return lost_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Rank> lost_;
  std::shared_ptr<Rendezvous> rendezvous_;
};

// A callable of Python's, (bytes, seconds) -> every rank's bytes, by rank.
Bootstrap::AllGather all_gather_by(nb::callable callable) {
  return [callable](const std::string& bytes, const Deadline& deadline) {
    const nb::gil_scoped_acquire locked;
    const auto left_s = static_cast<double>(deadline.left_ns()) * 1e-9;
    const nb::object all = callable(nb::bytes(bytes.data(), bytes.size()), left_s);
    return strings_of(nb::cast<std::vector<nb::bytes>>(all));
  };
}

void bind_bootstrap(nb::module_& module) {
  module.def("rank_list", &rank_list<uint32_t>, nb::arg("ranks"), "As messages name them.");
  nb::class_<Bootstrap>(module, "Bootstrap",
                        "How ranks meet, by an all-gather of bytes: core/window/bootstrap.h.")
      .def(
          "__init__",
          [](Bootstrap* self, std::string where, uint32_t rank, uint32_t ranks,
             nb::callable all_gather) {
            new (self)
                Bootstrap(std::move(where), rank, ranks, all_gather_by(std::move(all_gather)));
          },
          nb::arg("where"), nb::arg("rank"), nb::arg("ranks"), nb::arg("all_gather"),
          nb::sig("def __init__(self, where: str, rank: int, ranks: int, "
                  "all_gather: collections.abc.Callable[[bytes, float], list[bytes]]) -> None"))
      .def_static("at", &Bootstrap::at, nb::arg("address"), nb::arg("rank"), nb::arg("ranks"),
                  "At \"host:port\", where rank 0 listens meanwhile.")
      .def_prop_ro("rank", &Bootstrap::rank)
      .def_prop_ro("ranks", &Bootstrap::ranks)
      .def(
          "all_gather",
          [](const Bootstrap& self, const nb::bytes& bytes, double timeout_s) {
            return gathered([&, said = string_of(bytes)](LockReleased& released) {
              return self.all_gather(said, released.within(timeout_s));
            });
          },
          nb::arg("blob"), nb::arg("timeout_s"), "Every rank's bytes, by rank, as they are.")
      .def(
          "meet",
          [](const Bootstrap& self, const nb::bytes& card, double timeout_s) {
            std::string key;
            auto cards = gathered([&, said = string_of(card)](LockReleased& released) {
              Roster roster = self.meet(said, released.within(timeout_s));
              key = std::move(roster.key);
              return std::move(roster.cards);
            });
            return std::pair(nb::bytes(key.data(), key.size()), std::move(cards));
          },
          nb::arg("card"), nb::arg("timeout_s"),
          "A key that only these ranks have, and every rank's card, by rank.");
}

}  // namespace

void bind_window(nb::module_& module) {
  bind_bootstrap(module);
  nb::class_<Meeting>(module, "Rendezvous", "One rank's place among ranks that have met.")
      .def(nb::new_([](const Bootstrap& bootstrap, double timeout_s) {
             LockReleased released;
             return owned_by_process(
                 std::make_unique<Meeting>(bootstrap, released.within(timeout_s)));
           }),
           nb::arg("bootstrap"), nb::arg("timeout_s"))
      .def_prop_ro("rank", [](const Meeting& self) { return self.rendezvous().rank(); })
      .def_prop_ro("ranks", [](const Meeting& self) { return self.rendezvous().ranks(); })
      .def_prop_ro("lost", &Meeting::lost, "Peers whose processes ended without a goodbye.")
      .def(
          "all_gather_bytes",
          [](const Meeting& self, const std::string& tag, const nb::bytes& blob, double timeout_s) {
            return gathered([&, said = string_of(blob)](LockReleased& released) {
              return self.rendezvous().all_gather_bytes(tag, said, released.within(timeout_s));
            });
          },
          nb::arg("tag"), nb::arg("blob"), nb::arg("timeout_s"))
      .def(
          "exchange_fds",
          [](const Meeting& self, const std::string& tag, int fd, double timeout_s) {
            LockReleased released;
            std::vector<int> fds;
            for (Descriptor& received :
                 self.rendezvous().exchange_fds(tag, fd, released.within(timeout_s))) {
              fds.push_back(received.release());
            }
            return fds;
          },
          nb::arg("tag"), nb::arg("fd"), nb::arg("timeout_s"),
          "Every peer's descriptor, now this process's to close; -1 at this rank's own place.")
      .def(
          "barrier",
          [](const Meeting& self, const std::string& tag, double timeout_s) {
            LockReleased released;
            self.rendezvous().barrier(tag, released.within(timeout_s));
          },
          nb::arg("tag"), nb::arg("timeout_s"))
      .def("close", [](nb::handle_t<Meeting> self) {
        const Meeting* const here = if_here(self);
        LockReleased released;
        if (here != nullptr) here->rendezvous().close();
      });
}

}  // namespace offcore
