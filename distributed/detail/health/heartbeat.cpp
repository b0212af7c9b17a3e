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

Bytes pack(const Beat& beat) {
  Writer writer;
  writer.value(beat.group).value(beat.started).value(beat.first);
  writer.value(static_cast<std::uint32_t>(beat.calls.size()));
  for (const Call& call : beat.calls) {
    append(writer, call);
  }
  writer.value(static_cast<std::uint8_t>(beat.pending ? 1 : 0));
  if (beat.pending) {
    writer.value(beat.pending->number).value(beat.pending->seconds);
    append(writer, beat.pending->call);
  }
  return writer.take();
}

Beat unpack_beat(Reader& reader) {
  Beat beat;
  beat.group = reader.value<std::uint64_t>();
  beat.started = reader.value<std::uint64_t>();
  beat.first = reader.value<std::uint64_t>();
  const auto count = reader.value<std::uint32_t>();
  check(count <= Beat::most_calls, "a report of too many collectives");
  for (std::uint32_t i = 0; i < count; ++i) {
    beat.calls.push_back(read_call(reader));
  }
  if (reader.value<std::uint8_t>() != 0) {
    Beat::Pending pending;
    pending.number = reader.value<std::uint64_t>();
    pending.seconds = reader.value<double>();
    pending.call = read_call(reader);
    beat.pending = pending;
  }
  return beat;
}

}  // namespace mica::distributed::detail
