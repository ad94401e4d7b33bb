#include "core/comm/negotiate.h"

#include "core/base/error.h"
#include "core/window/socket.h"

namespace offcore {

std::string settle_signals(Rendezvous& rendezvous, const std::string& asked, std::string_view own,
                           const Deadline& deadline) {
  const std::string mine = Packer().text(asked).text(own).bytes();
  const std::vector<std::string> told = rendezvous.all_gather_bytes("signals", mine, deadline);
  for (size_t rank = 0; rank < told.size(); ++rank) {
    const std::string theirs(Unpacker(told[rank]).text());
    if (theirs == asked) continue;
    fail(Code::mismatch, "ranks ask for different signal forms: rank ", rendezvous.rank(), " for ",
         asked, ", rank ", rank, " for ", theirs, ". Pass the same signals= on all ranks");
  }
  Unpacker first(told[0]);
  first.text();
  return std::string(first.text());
}

}  // namespace offcore
