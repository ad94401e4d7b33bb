// What ranks settle before there is a communicator.
#pragma once
#include <string>

#include "core/window/rendezvous.h"

namespace offcore {

// The signal form of all ranks. `asked`: by the caller; `own`: what this rank's backend took. Where
// all ask for "auto", rank 0's is everybody's, since what each has proven may differ. Collective.
// Throws mismatch where ranks ask for different forms, and what an exchange throws.
std::string settle_signals(Rendezvous& rendezvous, const std::string& asked, std::string_view own,
                           const Deadline& deadline);

}  // namespace offcore
