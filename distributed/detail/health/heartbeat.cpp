#include <mica/distributed/detail/health/heartbeat.h>

namespace mica::distributed::detail {

namespace {

void append(Writer& writer, const Call& call) {
  const auto byte = [](auto x) { return static_cast<std::uint8_t>(x); };
  writer.value(byte(call.kind))
      .value(byte(call.dtype))
      .value(byte(call.reduction))
      .value(byte(call.on_gpu))
      .value(call.root)
      .value(call.count);
}

// A received value is used as an index into names, so it must be one of the enumerators.
template <class T>
T enumerator(Reader& reader, T last) {
  const auto value = reader.value<std::uint8_t>();
  check(value <= static_cast<std::uint8_t>(last), "a report with a value that does not exist");
  return static_cast<T>(value);
}

Call read_call(Reader& reader) {
  Call call;
  call.kind = enumerator(reader, CallKind::exchange);
  call.dtype = enumerator(reader, DType::boolean);
  call.reduction = enumerator(reader, Reduction::max);
  call.on_gpu = reader.value<std::uint8_t>() != 0;
  call.root = reader.value<std::int32_t>();
  call.count = reader.value<std::int64_t>();
  return call;
}

}  // namespace

Bytes pack(const Heartbeat& heartbeat) {
  Writer writer;
  writer.value(heartbeat.group).value(heartbeat.started).value(heartbeat.first);
  writer.value(static_cast<std::uint32_t>(heartbeat.calls.size()));
  for (const Call& call : heartbeat.calls) {
    append(writer, call);
  }
  writer.value(static_cast<std::uint8_t>(heartbeat.pending ? 1 : 0));
  if (heartbeat.pending) {
    writer.value(heartbeat.pending->number).value(heartbeat.pending->seconds);
    writer.value(static_cast<std::uint8_t>(heartbeat.pending->replay ? 1 : 0));
    append(writer, heartbeat.pending->call);
  }
  return writer.take();
}

Heartbeat unpack_heartbeat(Reader& reader) {
  Heartbeat heartbeat;
  heartbeat.group = reader.value<std::uint64_t>();
  heartbeat.started = reader.value<std::uint64_t>();
  heartbeat.first = reader.value<std::uint64_t>();
  const auto count = reader.value<std::uint32_t>();
  check(count <= Heartbeat::most_calls, "a report of too many collectives");
  for (std::uint32_t i = 0; i < count; ++i) {
    heartbeat.calls.push_back(read_call(reader));
  }
  if (reader.value<std::uint8_t>() != 0) {
    Heartbeat::Pending pending;
    pending.number = reader.value<std::uint64_t>();
    pending.seconds = reader.value<double>();
    pending.replay = reader.value<std::uint8_t>() != 0;
    pending.call = read_call(reader);
    heartbeat.pending = pending;
  }
  return heartbeat;
}

}  // namespace mica::distributed::detail
