#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <mica/distributed/detail/call.h>
#include <mica/distributed/detail/network/connection.h>

namespace mica::distributed::detail {

/// A rank's regular report about one group.
struct Heartbeat {
  struct Pending {
    std::uint64_t number = 0;
    Call call{};
    double seconds = 0;   ///< how long it has been the oldest unfinished one
    bool replay = false;  ///< whether it is part of a CUDA graph: then it may have to wait for long computations
  };

  std::uint64_t group = 0;
  std::uint64_t started = 0;         ///< collectives so far; they are numbered from 0
  std::uint64_t first = 0;           ///< number of calls[0]
  std::vector<Call> calls{};         ///< those started since the last report; the newest if there are too many
  std::optional<Pending> pending{};  ///< the oldest collective that has not ended

  static constexpr std::size_t most_calls = 1024;  ///< in one report
};

/// Serializes a heartbeat for a message.
Bytes pack(const Heartbeat& heartbeat);
/// The inverse. Throws Error if the bytes are not those of a heartbeat.
Heartbeat unpack_heartbeat(Reader& reader);

}  // namespace mica::distributed::detail
