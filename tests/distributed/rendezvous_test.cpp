#include <gtest/gtest.h>
#include <tests/distributed/support.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include <mica/distributed/detail/network/rendezvous.h>

namespace mica::distributed::detail {
namespace {

TEST(Rendezvous, ReadsTheFirstHostOfSlurmsList) {
  EXPECT_EQ(first_host("login"), "login");
  EXPECT_EQ(first_host("a,b"), "a");
  EXPECT_EQ(first_host("gpu[07-12,15],login"), "gpu07");
  EXPECT_EQ(first_host("gpu[3,5]"), "gpu3");
  EXPECT_EQ(first_host("rack[2-3]-ib,x"), "rack2-ib");
  EXPECT_THROW((void)first_host(""), Error);
  EXPECT_THROW((void)first_host("gpu[07"), Error);
}

TEST(Rendezvous, FindsTheAddressInTheEnvironment) {
  const Placement torchrun{.rank = 1, .size = 2, .launcher = "torchrun"};
  EXPECT_EQ(message_of([&] { (void)rendezvous_from_environment(torchrun); }),
            "world: torchrun started 2 processes, which need MPI or the variables MASTER_ADDR and MASTER_PORT to find "
            "each other");
  Token token{};
  {
    const Variables variables({{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "65530"}});
    const Rendezvous rendezvous = rendezvous_from_environment(torchrun);
    EXPECT_TRUE(rendezvous.loopback_only);
    ASSERT_EQ(rendezvous.addresses.size(), 6U);
    EXPECT_EQ(rendezvous.addresses[0].host, "127.0.0.1");
    EXPECT_EQ(rendezvous.addresses[5].port, 65535);
    token = rendezvous.token;
    EXPECT_EQ(rendezvous_from_environment(torchrun).token, token);
  }
  {
    // torchrun's store listens at the port itself.
    const Variables variables({{"MASTER_ADDR", "localhost"},
                               {"MASTER_PORT", "37599"},
                               {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                               {"TORCHELASTIC_RUN_ID", "078044d1-bedb-4bb4-ab95-787e13a1ea9c"}});
    const Rendezvous rendezvous = rendezvous_from_environment(torchrun);
    EXPECT_TRUE(rendezvous.loopback_only);
    ASSERT_EQ(rendezvous.addresses.size(), 16U);
    EXPECT_EQ(rendezvous.addresses.front().port, 37600);
    EXPECT_EQ(rendezvous.addresses.back().port, 37615);
    {
      const Variables restarted(std::vector<std::pair<const char*, const char*>>{{"TORCHELASTIC_RESTART_COUNT", "1"}});
      EXPECT_NE(rendezvous_from_environment(torchrun).token, rendezvous.token);
    }
    const Variables own(std::vector<std::pair<const char*, const char*>>{{"MICA_DIST_PORT", "6000"}});
    EXPECT_EQ(rendezvous_from_environment(torchrun).addresses.front().port, 6000);
  }
  {
    const Variables variables({{"MASTER_ADDR", "node"}, {"MASTER_PORT", "5000"}, {"MICA_DIST_PORT", "6000"}});
    const Rendezvous rendezvous = rendezvous_from_environment(torchrun);
    EXPECT_FALSE(rendezvous.loopback_only);
    EXPECT_EQ(rendezvous.addresses[0].port, 6000);
    EXPECT_NE(rendezvous.token, token);
  }
  {
    const Variables variables({{"MASTER_ADDR", "node"}, {"MASTER_PORT", "many"}});
    EXPECT_EQ(message_of([&] { (void)rendezvous_from_environment(torchrun); }),
              "world: expected the variable MASTER_PORT to be a port, got \"many\"");
  }
  const Variables variables({{"SLURM_JOB_ID", "77"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NODELIST", "n[4-5]"}});
  const Rendezvous rendezvous = rendezvous_from_environment({.rank = 1, .size = 2, .launcher = "Slurm"});
  EXPECT_EQ(rendezvous.addresses[0].host, "n4");
  EXPECT_GE(rendezvous.addresses[0].port, 20000);
}

TEST(Rendezvous, RunsHaveDifferentTokens) {
  using List = std::vector<std::pair<const char*, const char*>>;
  std::set<Token> tokens;
  const auto is_new = [&](const List& list) {
    const Variables variables(list);
    return tokens.insert(rendezvous_from_environment({.rank = 1, .size = 2, .launcher = "torchrun"}).token).second;
  };
  EXPECT_TRUE(is_new({{"MASTER_ADDR", "other"}, {"MASTER_PORT", "5000"}}));
  EXPECT_TRUE(is_new({{"MASTER_ADDR", "node"}, {"MASTER_PORT", "5001"}}));
  const Variables address(List{{"MASTER_ADDR", "node"}, {"MASTER_PORT", "5000"}});
  for (const char* const name :
       {"SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MICA_DIST_TOKEN"}) {
    EXPECT_TRUE(is_new({{name, "x"}})) << name;
  }
  // With tokens of 16 random bits instead of 128, hundreds of these would be equal.
  for (int run = 0; run < 5000; ++run) {
    const std::string id = std::to_string(run);
    ASSERT_TRUE(is_new({{"TORCHELASTIC_RUN_ID", id.c_str()}})) << run;
  }
}

TEST(Rendezvous, TakesTheNextPortIfOneIsInUse) {
  const Descriptor taken = std::move(*listen_on(0, true));
  const int port = port_of(taken);
  EXPECT_FALSE(listen_on(port, true).has_value());
  EXPECT_NE(message_of([&] {
              (void)listen_at({{"", port}}, true);
            }).find("are in use; set MICA_DIST_PORT"),
            std::string::npos);
  const Descriptor next = listen_at({{"", port}, {"", 0}}, true);
  EXPECT_NE(port_of(next), port);
}

}  // namespace
}  // namespace mica::distributed::detail
