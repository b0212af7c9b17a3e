#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <mica/distributed/detail/network/connection.h>
#include <mica/distributed/detail/network/placement.h>

namespace mica::distributed::detail {

/// How the processes of a run find each other without MPI.
struct Rendezvous {
  std::vector<Address> addresses{};  ///< rank 0 listens at the first whose port is free
  bool loopback_only = false;
  Token token{};  ///< tells runs apart that might connect to each other by accident; not a secret
};

/// From MASTER_ADDR and MASTER_PORT or, under Slurm without these, from the nodes and the number of the job. Throws an
/// Error if they are not set or have an impossible value.
Rendezvous rendezvous_from_environment(const Placement& placement);

/// Listens at the first of the addresses' ports that is free. Throws an Error if none is.
Descriptor listen_at(const std::vector<Address>& addresses, bool loopback_only);

/// The first of a list of hosts in Slurm's notation: "gpu[07-12,15],login" gives "gpu07".
std::string first_host(std::string_view list);

/// The ports to try, from MICA_DIST_PORT; if it is not set, only 0, which means any port.
std::vector<int> ports_from_environment();

/// A token that cannot be guessed.
Token random_token();

}  // namespace mica::distributed::detail
