#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <mica/dist/detail/control.h>
#include <mica/dist/detail/placement.h>

namespace mica::dist::detail {

/// Where the processes of a run meet, if no MPI tells them.
struct Meeting {
  std::vector<Address> addresses{};  ///< rank 0 listens at the first whose port is free
  bool loopback_only = false;
  Token token{};  ///< differs between runs that may meet by accident; it is no secret
};

/// From MASTER_ADDR and MASTER_PORT or, under Slurm without these, from the nodes and the number of the job. Throws an
/// Error if they are not set or have an impossible value.
Meeting meeting_from_environment(const Placement& placement);

/// Listens at the first of the addresses' ports that is free. Throws an Error if none is.
Descriptor listen_at(const std::vector<Address>& addresses, bool loopback_only);

/// The first of a list of hosts in Slurm's notation: "gpu[07-12,15],login" gives "gpu07".
std::string first_host(std::string_view list);

/// The ports that are tried, from MICA_DIST_PORT; only 0, which means any, if it is not set.
std::vector<int> ports_from_environment();

/// Not to be guessed.
Token random_token();

}  // namespace mica::dist::detail
