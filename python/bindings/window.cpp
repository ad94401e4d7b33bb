// The rendezvous, for tests and tools; communicators join theirs inside the core.
#include "core/window/rendezvous.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <mutex>

#include "core/base/error.h"
#include "core/window/bootstrap.h"
#include "module.h"
#include "process.h"
#include "released.h"

namespace offcore {
namespace {

// A rendezvous, and the peers whose processes have died.
class Meeting : public OfProcess {
 public:
  Meeting(const std::string& store, Rank rank, Rank ranks, const Deadline& deadline)
      : OfProcess("the rendezvous"), rendezvous_(Rendezvous::join(store, rank, ranks, deadline)) {
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

std::vector<nb::bytes> all_gather(const Meeting& self, const std::string& tag,
                                  const nb::bytes& blob, double timeout_s) {
  const std::string_view bytes(blob.c_str(), blob.size());
  std::vector<std::string> blobs;
  {
    LockReleased released;
    blobs = self.rendezvous().all_gather_bytes(tag, bytes, released.within(timeout_s));
  }
  std::vector<nb::bytes> result;
  for (const std::string& one : blobs) result.emplace_back(one.data(), one.size());
  return result;
}

std::vector<nb::bytes> meet_at(const std::string& store, uint32_t rank, uint32_t ranks,
                               const nb::bytes& card, double timeout_s) {
  const std::string said(card.c_str(), card.size());
  Roster roster;
  {
    LockReleased released;
    roster = meet(store, rank, ranks, said, released.within(timeout_s));
  }
  std::vector<nb::bytes> cards;
  for (const std::string& one : roster.cards) cards.emplace_back(one.data(), one.size());
  return cards;
}

}  // namespace

void bind_window(nb::module_& module) {
  module.attr("CARD_BYTES_MAX") = kCardBytesMax;
  module.def("meet", &meet_at, nb::arg("store"), nb::arg("rank"), nb::arg("world_size"),
             nb::arg("card"), nb::arg("timeout_s"), "Every rank's card: core/window/bootstrap.h.");
  nb::class_<Meeting>(module, "Rendezvous",
                      "One rank's place among ranks that meet at a store (\"host:port\").")
      .def(nb::new_([](const std::string& store, Rank rank, Rank ranks, double timeout_s) {
             LockReleased released;
             return owned_by_process(
                 std::make_unique<Meeting>(store, rank, ranks, released.within(timeout_s)));
           }),
           nb::arg("store"), nb::arg("rank"), nb::arg("world_size"), nb::arg("timeout_s"))
      .def_prop_ro("rank", [](const Meeting& self) { return self.rendezvous().rank(); })
      .def_prop_ro("ranks", [](const Meeting& self) { return self.rendezvous().ranks(); })
      .def_prop_ro("key", [](const Meeting& self) { return self.rendezvous().key(); })
      .def_prop_ro("lost", &Meeting::lost, "Peers whose processes ended without a goodbye.")
      .def("all_gather_bytes", &all_gather, nb::arg("tag"), nb::arg("blob"), nb::arg("timeout_s"))
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
