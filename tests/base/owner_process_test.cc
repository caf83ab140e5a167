#include "base/owner_process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace orlop {
namespace {

// What a child finds by itself, as the code with which it ends.
int code_of_child(int (*body)(const OwnerProcess& of_parent)) {
  const OwnerProcess here;
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body(here));
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(here.is_this());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(OwnerProcess, AChildOwnsWhatItMakesAndNothingElse) {
  EXPECT_EQ(code_of_child([](const OwnerProcess& of_parent) {
              const OwnerProcess own;
              return !of_parent.is_this() && own.is_this() ? 0 : 1;
            }),
            0);
}

TEST(OwnerProcess, NorDoesAChildsChild) {
  EXPECT_EQ(code_of_child([](const OwnerProcess& of_parent) {
              const OwnerProcess own;
              const pid_t child = ::fork();
              if (child == 0) ::_exit(of_parent.is_this() || own.is_this() ? 1 : 0);
              int status = 0;
              ::waitpid(child, &status, 0);
              return WEXITSTATUS(status);
            }),
            0);
}

TEST(OwnerProcess, IsNamedToWhoeverInheritedIt) {
  EXPECT_EQ(code_of_child([](const OwnerProcess& of_parent) {
              try {
                of_parent.check_this("engine");
              } catch (const Error& error) {
                const std::string text = error.what();
                return text.find("this engine belongs to process " + std::to_string(::getppid())) ==
                               std::string::npos
                           ? 1
                           : 0;
              }
              return 2;
            }),
            0);
}

}  // namespace
}  // namespace orlop
