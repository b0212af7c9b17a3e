#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <mica/distributed/detail/call.h>
#include <mica/distributed/detail/network/connection.h>

namespace mica::distributed::detail {

/// A rank's regular report ("heartbeat") about one group: at most `most_calls` calls.
struct Beat {
  struct Pending {
    std::uint64_t number = 0;
    Call call{};
    double seconds = 0;  ///< how long it has been the oldest unfinished one
  };

  std::uint64_t group = 0;
  std::uint64_t started = 0;         ///< collectives so far; they are numbered from 0
  std::uint64_t first = 0;           ///< number of calls[0]
  std::vector<Call> calls{};         ///< those started since the last report; the newest if there are too many
  std::optional<Pending> pending{};  ///< the oldest collective that has not ended

  static constexpr std::size_t most_calls = 1024;
};

/// Serializes a beat for a message.
Bytes pack(const Beat& beat);
/// The inverse. Throws Error if the bytes are not those of a beat.
Beat unpack_beat(Reader& reader);

}  // namespace mica::distributed::detail
