#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include <mica/core/copy.h>
#include <mica/core/dispatch.h>
#include <mica/io/file.h>
#include <mica/io/tensorboard.h>
#include <mica/io/text.h>

// A file is a sequence of records (TFRecord): the length of the data, 8 bytes; its checksum, 4; the data; its checksum,
// 4; all little-endian. The data of each is a message `Event` in protobuf's wire format. Sources:
// https://www.tensorflow.org/tutorials/load_data/tfrecord and tensorboard/compat/proto/{event,summary,tensor}.proto.

namespace mica::io {

static_assert(std::endian::native == std::endian::little);

namespace {

constexpr int kBuckets = 30;

// CRC-32C (RFC 3720, appendix B.4): the polynomial 0x1EDC6F41, bits reversed.
constexpr std::array<std::uint32_t, 256> kCrcTable = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit) {
      remainder = (remainder >> 1) ^ ((remainder & 1) != 0 ? 0x82F63B78 : 0);
    }
    table[byte] = remainder;
  }
  return table;
}();

std::uint32_t crc32c(std::string_view data) {
  std::uint32_t crc = 0xFFFFFFFF;
  for (const char c : data) {
    crc = (crc >> 8) ^ kCrcTable[(crc ^ static_cast<unsigned char>(c)) & 0xFF];
  }
  return ~crc;
}

// Data may itself contain checksums, so TFRecord stores them masked.
std::uint32_t masked_crc(std::string_view data) { return std::rotr(crc32c(data), 15) + 0xA282EAD8; }

template <class T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

/// A message of protobuf (https://protobuf.dev/programming-guides/encoding): fields in the order of the calls.
class Message {
 public:
  Message& integer(int field, std::int64_t value) {
    tag(field, 0);
    varint(static_cast<std::uint64_t>(value));
    return *this;
  }
  Message& real(int field, double value) {
    tag(field, 1);
    bytes_ += bytes_of(value);
    return *this;
  }
  Message& real32(int field, float value) {
    tag(field, 5);
    bytes_ += bytes_of(value);
    return *this;
  }
  Message& text(int field, std::string_view value) {
    tag(field, 2);
    varint(value.size());
    bytes_ += value;
    return *this;
  }
  Message& message(int field, const Message& value) { return text(field, value.bytes_); }
  Message& reals(int field, const std::vector<double>& values) {
    return text(field, {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double)});
  }
  const std::string& bytes() const { return bytes_; }

 private:
  void tag(int field, unsigned wire_type) { varint(static_cast<unsigned>(field) << 3 | wire_type); }
  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) {
      bytes_ += static_cast<char>(value | 0x80);
    }
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

void check_utf8(const char* what, std::string_view text) {
  try {
    from_utf8(text);
  } catch (const Error&) {
    fail("EventWriter: expected a {} in UTF-8", what);
  }
}

// A HistogramProto stores the right end of each bucket; the first bucket begins at `least`.
struct Histogram {
  double least = 0, greatest = 0, count = 0, sum = 0, sum_of_squares = 0;
  std::vector<double> bounds{0}, counts{0};
};

template <class T>
Histogram histogram_of(const T* values, std::int64_t n) {
  Histogram h;
  h.least = std::numeric_limits<double>::infinity();
  h.greatest = -h.least;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto x = static_cast<double>(values[i]);
    if (std::isfinite(x)) {
      h.least = std::min(h.least, x);
      h.greatest = std::max(h.greatest, x);
      h.count += 1;
      h.sum += x;
      h.sum_of_squares += x * x;
    }
  }
  if (h.count == 0) {
    return {};
  }
  // Computed from halves, since the difference of two finite numbers may be infinite.
  const double half_width = h.greatest / 2 - h.least / 2;
  const int buckets = half_width > 0 ? kBuckets : 1;
  h.bounds.clear();
  for (int i = 1; i < buckets; ++i) {
    const double part = static_cast<double>(i) / buckets;
    h.bounds.push_back(h.least * (1 - part) + h.greatest * part);
  }
  h.bounds.push_back(h.greatest);
  h.counts.assign(h.bounds.size(), 0);
  for (std::int64_t i = 0; i < n; ++i) {
    const auto x = static_cast<double>(values[i]);
    if (std::isfinite(x)) {
      const double part = half_width > 0 ? (x / 2 - h.least / 2) / half_width : 0;
      h.counts[static_cast<std::size_t>(std::min(part * buckets, buckets - 1.0))] += 1;
    }
  }
  return h;
}

Histogram histogram_of(const Tensor& values) {
  // float64 drops digits of 64-bit integers, which a histogram does not show anyway.
  const DType dtype =
      values.dtype() == float16 || values.dtype() == bfloat16 || values.dtype() == float32 ? float32 : float64;
  const Tensor host = empty(values.shape(), dtype);
  copy_into(host, values);
  Histogram result;
  on_dtype(Types<float, double>{}, dtype, "EventWriter",
           [&]<class T>() { result = histogram_of(host.data<T>(), host.numel()); });
  return result;
}

}  // namespace

EventWriter::EventWriter(const std::filesystem::path& folder, EventWriterOptions options)
    : clock_(std::move(options.clock)) {
  if (!clock_) {
    clock_ = [] { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); };
  }
  make_folder(folder, "EventWriter");
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0 || std::strchr(host.data(), '/') != nullptr) {
    host = {"localhost"};
  }
  // TensorBoard reads all files with "tfevents" in their names, in the order of the names.
  static std::atomic<unsigned> next{0};
  do {
    path_ = folder / fmt::format("events.out.tfevents.{:010}.{}.{}.{}", static_cast<std::int64_t>(clock_()),
                                 host.data(), ::getpid(), next.fetch_add(1));
    descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
  } while (descriptor_ < 0 && errno == EEXIST);
  check(descriptor_ >= 0, "EventWriter: cannot create {}: {}", path_.string(), error_text(errno));
  try {
    write_record(Message().real(1, clock_()).text(3, "brain.Event:2").bytes());
    if (options.resumed_at) {
      write_session_start(*options.resumed_at);
    }
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
}

EventWriter::~EventWriter() { ::close(descriptor_); }

void EventWriter::scalar(std::string_view tag, double value, std::int64_t step) {
  check_utf8("tag", tag);
  write_value(Message().text(1, tag).real32(2, static_cast<float>(value)).bytes(), step);
}

void EventWriter::text(std::string_view tag, std::string_view text, std::int64_t step) {
  check_utf8("tag", tag);
  check_utf8("text", text);
  constexpr int kString = 7;  // DataType
  const Message shape = Message().message(2, Message().integer(1, 1));
  const Message tensor = Message().integer(1, kString).message(2, shape).text(8, text);
  const Message metadata = Message().message(1, Message().text(1, "text"));  // the plugin that displays it
  write_value(Message().text(1, tag).message(8, tensor).message(9, metadata).bytes(), step);
}

void EventWriter::histogram(std::string_view tag, const Tensor& values, std::int64_t step) {
  check_utf8("tag", tag);
  check(values.defined(), "EventWriter: expected a defined tensor for the histogram {}, got an undefined one", tag);
  const Histogram h = histogram_of(values);
  Message message;
  const std::array<double, 5> statistics{h.least, h.greatest, h.count, h.sum, h.sum_of_squares};
  for (std::size_t i = 0; i < statistics.size(); ++i) {
    if (statistics[i] != 0) {  // 0 is the default and not written
      message.real(static_cast<int>(i) + 1, statistics[i]);
    }
  }
  message.reals(6, h.bounds).reals(7, h.counts);
  write_value(Message().text(1, tag).message(5, message).bytes(), step);
}

// Writes an Event with a Summary of one Value.
void EventWriter::write_value(const std::string& value, std::int64_t step) {
  write_event(step, 5, Message().text(1, value).bytes());
}

// Writes an Event with a SessionLog.
void EventWriter::write_session_start(std::int64_t step) {
  constexpr int kStart = 1;  // SessionStatus
  write_event(step, 7, Message().integer(1, kStart).bytes());
}

void EventWriter::write_event(std::int64_t step, int field, const std::string& what) {
  Message event;
  event.real(1, clock_());
  if (step != 0) {
    event.integer(2, step);
  }
  write_record(event.text(field, what).bytes());
}

void EventWriter::write_record(const std::string& data) {
  const std::uint64_t length = data.size();
  std::string record(bytes_of(length));
  record += bytes_of(masked_crc(record));
  record += data;
  record += bytes_of(masked_crc(data));
  // Whole: readers stop at an incomplete record, and would miss those after it.
  append("EventWriter", descriptor_, record, path_);
}

}  // namespace mica::io
