#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include <mica/distributed/detail/network/connection.h>

namespace mica::distributed::detail {

namespace {

constexpr std::size_t header = sizeof(std::uint32_t) + 1;

// Close on exec, since child processes would keep connections open; never block or delay small messages.
void set_options(int socket) {
  (void)fcntl(socket, F_SETFD, FD_CLOEXEC);
  (void)fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
  const int yes = 1;
  (void)setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<long long>(left, 0, 1'000'000));
}

bool wait_for(int descriptor, short events, Clock::time_point deadline) {
  for (;;) {
    pollfd waiting{.fd = descriptor, .events = events, .revents = 0};
    const int count = poll(&waiting, 1, milliseconds_until(deadline));
    if (count >= 0 || errno != EINTR) {
      return count > 0;
    }
  }
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) {
    (void)close(number_);
  }
}

std::optional<Descriptor> listen_on(int port, bool loopback_only) {
  // IPv6 sockets take IPv4 connections, too. Some machines have no IPv6.
  for (const int family : {AF_INET6, AF_INET}) {
    if (family == AF_INET6 && loopback_only) {
      continue;
    }
    Descriptor listener(socket(family, SOCK_STREAM, 0));
    if (listener.number() < 0) {
      continue;
    }
    set_options(listener.number());
    const int yes = 1, no = 0;
    (void)setsockopt(listener.number(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    int status = 0;
    if (family == AF_INET6) {
      (void)setsockopt(listener.number(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
      sockaddr_in6 address{};
      address.sin6_family = AF_INET6;
      address.sin6_addr = in6addr_any;
      address.sin6_port = htons(static_cast<std::uint16_t>(port));
      status = bind(listener.number(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
    } else {
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_addr.s_addr = htonl(loopback_only ? INADDR_LOOPBACK : INADDR_ANY);
      address.sin_port = htons(static_cast<std::uint16_t>(port));
      status = bind(listener.number(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
    }
    if (status == 0) {
      status = listen(listener.number(), 1024);
    }
    if (status == 0) {
      return listener;
    }
    if (errno == EADDRINUSE) {
      return std::nullopt;
    }
    check(family == AF_INET6, "world: cannot listen on TCP port {}: {}", port, std::strerror(errno));
  }
  fail("world: cannot listen on TCP port {}: {}", port, std::strerror(errno));
}

int port_of(const Descriptor& listener) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  check(getsockname(listener.number(), reinterpret_cast<sockaddr*>(&address), &size) == 0,
        "world: getsockname failed: {}", std::strerror(errno));
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

std::optional<Descriptor> accept_from(const Descriptor& listener) {
  Descriptor accepted(accept(listener.number(), nullptr, nullptr));
  if (accepted.number() < 0) {
    return std::nullopt;
  }
  set_options(accepted.number());
  return accepted;
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> others, loopback;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) == 0) {
    for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) {
        continue;
      }
      const int family = entry->ifa_addr->sa_family;
      if (family != AF_INET && family != AF_INET6) {
        continue;
      }
      // Link-local addresses are valid on their own interface only.
      if (family == AF_INET6 &&
          IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr)->sin6_addr)) {
        continue;
      }
      std::array<char, NI_MAXHOST> text{};
      const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      if (getnameinfo(entry->ifa_addr, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0) {
        ((entry->ifa_flags & IFF_LOOPBACK) != 0 ? loopback : others).emplace_back(text.data());
      }
    }
    freeifaddrs(list);
  }
  others.insert(others.end(), loopback.begin(), loopback.end());
  return others;
}

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown host";
}

Connection::Connection(Descriptor socket, std::size_t limit) : socket_(std::move(socket)), limit_(limit) {}

void Connection::send(std::uint8_t type, const Bytes& payload) {
  const auto size = static_cast<std::uint32_t>(payload.size());
  const auto* const begin = reinterpret_cast<const std::byte*>(&size);
  out_.insert(out_.end(), begin, begin + sizeof size);
  out_.push_back(static_cast<std::byte>(type));
  out_.insert(out_.end(), payload.begin(), payload.end());
}

void Connection::flush() {
  while (!closed_ && sent_ < out_.size()) {
    const ssize_t count =
        ::send(socket_.number(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      sent_ += static_cast<std::size_t>(count);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno != EINTR) {
      break;  // receive() detects the end, after it has read the data sent before
    }
  }
  out_.clear();
  sent_ = 0;
}

void Connection::receive() {
  std::array<std::byte, 65536> buffer;
  while (!closed_) {
    const ssize_t count = recv(socket_.number(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (count > 0) {
      in_.insert(in_.end(), buffer.data(), buffer.data() + count);
      // There may be several messages; this bounds memory.
      if (in_.size() - read_ > limit_ + buffer.size()) {
        return;
      }
    } else if (count < 0 && errno == EINTR) {
      continue;
    } else if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return;
    } else {
      closed_ = true;
    }
  }
}

std::optional<Message> Connection::next() {
  if (in_.size() - read_ < header) {
    return std::nullopt;
  }
  std::uint32_t size = 0;
  std::memcpy(&size, in_.data() + read_, sizeof size);
  if (size > limit_) {
    closed_ = true;
    in_.clear();
    read_ = 0;
    return std::nullopt;
  }
  if (in_.size() - read_ < header + size) {
    return std::nullopt;
  }
  const std::byte* const begin = in_.data() + read_ + header;
  Message message{.type = static_cast<std::uint8_t>(in_[read_ + sizeof size]), .payload = Bytes(begin, begin + size)};
  read_ += header + size;
  if (read_ == in_.size() || read_ > 65536) {
    in_.erase(in_.begin(), in_.begin() + static_cast<std::ptrdiff_t>(read_));
    read_ = 0;
  }
  return message;
}

void Connection::finish() { (void)shutdown(socket_.number(), SHUT_WR); }

std::unique_ptr<Connection> connect_to(const std::vector<Address>& to, Clock::time_point deadline,
                                       const std::function<bool(Connection&, Clock::time_point)>& accepted) {
  for (const Address& address : to) {
    addrinfo wanted{};
    wanted.ai_socktype = SOCK_STREAM;
    addrinfo* list = nullptr;
    if (getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &wanted, &list) != 0) {
      continue;
    }
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, freeaddrinfo);
    for (const addrinfo* entry = list; entry != nullptr && Clock::now() < deadline; entry = entry->ai_next) {
      Descriptor socket(::socket(entry->ai_family, SOCK_STREAM, 0));
      if (socket.number() < 0) {
        continue;
      }
      set_options(socket.number());
      // An address that does not answer must not use up the time for the others.
      const Clock::time_point soon = std::min(deadline, Clock::now() + std::chrono::seconds(3));
      if (connect(socket.number(), entry->ai_addr, entry->ai_addrlen) != 0) {
        int error = 0;
        socklen_t size = sizeof error;
        if (errno != EINPROGRESS || !wait_for(socket.number(), POLLOUT, soon) ||
            getsockopt(socket.number(), SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) {
          continue;
        }
      }
      auto connection = std::make_unique<Connection>(std::move(socket), 1 << 16);
      if (accepted(*connection, soon)) {
        return connection;
      }
    }
  }
  return nullptr;
}

bool wait_to_read(const Connection& connection, Clock::time_point deadline) {
  return wait_for(connection.descriptor(), POLLIN, deadline);
}

}  // namespace mica::distributed::detail
