#include <sys/random.h>

#include <charconv>
#include <cstdlib>
#include <optional>

#include <mica/core/check.h>
#include <mica/distributed/detail/network/rendezvous.h>

namespace mica::distributed::detail {

namespace {

// Another program may use the first port.
constexpr int ports_tried = 16;

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::vector<int> ports_from(const char* name, const std::string& text, bool first_is_taken = false) {
  int first = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), first);
  check(error == std::errc{} && end == text.data() + text.size() && first >= 1 && first <= 65535,
        "world: expected the variable {} to be a port, got \"{}\"", name, text);
  first += first_is_taken && first < 65535 ? 1 : 0;
  std::vector<int> ports;
  for (int port = first; port < first + ports_tried && port <= 65535; ++port) {
    ports.push_back(port);
  }
  return ports;
}

// FNV-1a, 64 bits.
std::uint64_t hash(std::string_view text, std::uint64_t seed) {
  std::uint64_t h = 14695981039346656037U ^ seed;
  for (const char c : text) {
    h = (h ^ static_cast<unsigned char>(c)) * 1099511628211U;
  }
  return h;
}

}  // namespace

std::string first_host(std::string_view list) {
  const std::size_t end = list.find_first_of(",[");
  std::string host(list.substr(0, end));
  if (end != std::string_view::npos && list[end] == '[') {
    const std::size_t stop = list.find_first_of(",-]", end + 1);
    const std::size_t close = list.find(']', end + 1);
    check(stop != std::string_view::npos && close != std::string_view::npos,
          "world: cannot read Slurm's list of nodes \"{}\"", list);
    host += list.substr(end + 1, stop - end - 1);
    host += list.substr(close + 1, list.find(',', close + 1) - close - 1);  // the part after the brackets
  }
  check(!host.empty(), "world: cannot read Slurm's list of nodes \"{}\"", list);
  return host;
}

std::vector<int> ports_from_environment() {
  const std::string text = variable("MICA_DIST_PORT");
  return text.empty() ? std::vector<int>{0} : ports_from("MICA_DIST_PORT", text);
}

Rendezvous rendezvous_from_environment(const Placement& placement) {
  Rendezvous rendezvous;
  std::string host = variable("MASTER_ADDR"), port = variable("MASTER_PORT");
  const std::string job = variable("SLURM_JOB_ID"), step = variable("SLURM_STEP_ID");
  const char* port_variable = "MASTER_PORT";
  // torchrun itself then listens at MASTER_PORT, and its store must not get messages from us.
  bool first_is_taken = variable("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (host.empty() && placement.launcher == "Slurm") {
    std::string nodes = variable("SLURM_STEP_NODELIST");
    host = first_host(nodes.empty() ? variable("SLURM_JOB_NODELIST") : nodes);
  }
  if (port.empty() && placement.launcher == "Slurm") {
    // The same port on all nodes, and rarely that of another job.
    port = std::to_string(20000 + hash(job + "." + step, 0) % 12000);
    first_is_taken = false;
  }
  if (const std::string own = variable("MICA_DIST_PORT"); !own.empty()) {
    port = own;
    port_variable = "MICA_DIST_PORT";
    first_is_taken = false;
  }
  check(
      !host.empty() && !port.empty(),
      "world: {} started {} processes, which need MPI or the variables MASTER_ADDR and MASTER_PORT to find each other",
      placement.launcher, placement.size);
  for (const int number : ports_from(port_variable, port, first_is_taken)) {
    rendezvous.addresses.push_back({.host = host, .port = number});
  }
  rendezvous.loopback_only = host == "localhost" || host == "127.0.0.1";
  const std::string run = fmt::format("{}|{}|{}|{}|{}|{}|{}", host, port, job, step, variable("TORCHELASTIC_RUN_ID"),
                                      variable("TORCHELASTIC_RESTART_COUNT"), variable("MICA_DIST_TOKEN"));
  for (std::size_t i = 0; i < rendezvous.token.size(); ++i) {
    rendezvous.token[i] = static_cast<std::byte>(hash(run, i / 8 + 1) >> (i % 8 * 8));
  }
  return rendezvous;
}

Descriptor listen_at(const std::vector<Address>& addresses, bool loopback_only) {
  for (const Address& address : addresses) {
    if (std::optional<Descriptor> listener = listen_on(address.port, loopback_only)) {
      return std::move(*listener);
    }
  }
  fail("world: TCP ports {} to {} are in use; set MICA_DIST_PORT to another one on all ranks", addresses.front().port,
       addresses.back().port);
}

Token random_token() {
  Token token{};
  check(getrandom(token.data(), token.size(), 0) == static_cast<ssize_t>(token.size()), "world: getrandom failed");
  return token;
}

}  // namespace mica::distributed::detail
