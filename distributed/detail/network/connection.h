#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <mica/core/check.h>

namespace mica::distributed::detail {

using Bytes = std::vector<std::byte>;
using Clock = std::chrono::steady_clock;

/// Serializes values. Assumes that all ranks have the same byte order.
class Writer {
 public:
  template <class T>
  Writer& value(const T& x) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    return raw(&x, sizeof x);
  }
  Writer& text(const std::string& x) { return value(static_cast<std::uint32_t>(x.size())).raw(x.data(), x.size()); }
  Writer& bytes(const Bytes& x) { return value(static_cast<std::uint32_t>(x.size())).raw(x.data(), x.size()); }

  Bytes take() { return std::move(bytes_); }

 private:
  Writer& raw(const void* data, std::size_t size) {
    const auto* const begin = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), begin, begin + size);
    return *this;
  }

  Bytes bytes_;
};

/// Reads values that a Writer has written, in the same order. Throws an Error if the bytes end too early.
class Reader {
 public:
  explicit Reader(const Bytes& bytes) : bytes_(bytes) {}

  template <class T>
  T value() {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    T x;
    std::memcpy(&x, next(sizeof x), sizeof x);
    return x;
  }
  std::string text() {
    const auto size = value<std::uint32_t>();
    return {reinterpret_cast<const char*>(next(size)), size};
  }
  Bytes bytes() {
    const auto size = value<std::uint32_t>();
    const std::byte* const begin = next(size);
    return {begin, begin + size};
  }

 private:
  const std::byte* next(std::size_t size) {
    check(size <= bytes_.size() - at_, "a message that is too short");
    return bytes_.data() + std::exchange(at_, at_ + size);
  }

  const Bytes& bytes_;
  std::size_t at_ = 0;
};

/// Owns a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor();

  int number() const { return number_; }

 private:
  int number_;
};

/// Identifies the processes of a run, so that rank 0 can refuse other connections.
using Token = std::array<std::byte, 16>;

/// Where a process listens. `host` is a name or an IP address.
struct Address {
  std::string host;
  int port = 0;
};

/// Listens on a TCP port, on the loopback interface or on all interfaces. Port 0: any free port. Returns nullopt if the
/// port is in use; throws an Error for other failures.
std::optional<Descriptor> listen_on(int port, bool loopback_only);
int port_of(const Descriptor& listener);
/// Accepts a pending connection, if there is one.
std::optional<Descriptor> accept_from(const Descriptor& listener);

/// The addresses of this machine's interfaces that are up; the loopback interface comes last.
std::vector<std::string> own_addresses();
std::string host_name();

struct Message {
  std::uint8_t type = 0;
  Bytes payload{};
};

/// Messages over a TCP connection. No function blocks.
class Connection {
 public:
  /// A message that is longer than `limit` bytes closes the connection.
  Connection(Descriptor socket, std::size_t limit);

  int descriptor() const { return socket_.number(); }
  void set_limit(std::size_t limit) { limit_ = limit; }

  /// Queues the message; flush() sends it.
  void send(std::uint8_t type, const Bytes& payload);
  void flush();
  bool flushed() const { return sent_ == out_.size(); }

  /// Reads the data that has arrived.
  void receive();
  /// The next complete message, if there is one.
  std::optional<Message> next();

  /// Whether the connection was closed by the other side or broke. next() may still return earlier messages.
  bool closed() const { return closed_; }
  /// Closes the sending direction: nothing more will be sent.
  void finish();

 private:
  Descriptor socket_;
  std::size_t limit_;
  bool closed_ = false;
  Bytes in_;
  std::size_t read_ = 0;  // of in_
  Bytes out_;
  std::size_t sent_ = 0;  // of out_
};

/// Connects to each address of `to` in turn, and returns the first connection for which `accepted` returns true, or
/// null. `accepted` may wait until the time that is passed to it.
std::unique_ptr<Connection> connect_to(const std::vector<Address>& to, Clock::time_point deadline,
                                       const std::function<bool(Connection&, Clock::time_point)>& accepted);

/// Waits until the connection can be read or closes. Returns false at the deadline.
bool wait_to_read(const Connection& connection, Clock::time_point deadline);

}  // namespace mica::distributed::detail
