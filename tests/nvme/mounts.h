#pragma once

#include <sys/mount.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "support.h"

namespace orlop::nvme {

// A file system of its own for one test, unmounted at the end. mounted() is false where the machine
// does not let tests mount; why() tells the reason.
class Mount {
 public:
  static Mount tmpfs(size_t mib, bool read_only = false) {
    Mount mount;
    const std::string options = "size=" + std::to_string(mib) + "m";
    mount.finish(::mount("tmpfs", mount.path().c_str(), "tmpfs", read_only ? MS_RDONLY : 0,
                         options.c_str()) == 0);
    return mount;
  }

  // ext4 on a loop device with the given sector length in bytes; `options` as of mount -o.
  static Mount ext4(size_t mib, size_t sector_bytes, const char* options = "") {
    Mount mount;
    const std::string image = *mount.base_ / "image";
    std::ofstream(image).close();
    std::filesystem::resize_file(image, mib << 20);
    mount.device_ = output_of("losetup --find --show --sector-size " +
                              std::to_string(sector_bytes) + " " + image + " 2>/dev/null");
    const bool made =
        !mount.device_.empty() &&
        std::system(("mkfs.ext4 -q -m 0 " + mount.device_ + " >/dev/null 2>&1").c_str()) == 0;
    mount.finish(made &&
                 ::mount(mount.device_.c_str(), mount.path().c_str(), "ext4", 0, options) == 0);
    return mount;
  }

  static Mount overlay() {
    Mount mount;
    for (const char* name : {"lower", "upper", "work"}) {
      std::filesystem::create_directory(*mount.base_ / name);
    }
    const std::string options = "lowerdir=" + *mount.base_ / "lower" +
                                ",upperdir=" + *mount.base_ / "upper" +
                                ",workdir=" + *mount.base_ / "work";
    mount.finish(::mount("overlay", mount.path().c_str(), "overlay", 0, options.c_str()) == 0);
    return mount;
  }

  Mount(Mount&&) = default;
  ~Mount() {
    if (!base_) return;
    if (mounted_) ::umount2(path().c_str(), MNT_DETACH);
    if (!device_.empty()) {
      const int ignored = std::system(("losetup --detach " + device_ + " 2>/dev/null").c_str());
      static_cast<void>(ignored);
    }
  }

  bool mounted() const { return mounted_; }
  const std::string& why() const { return why_; }
  std::string path() const { return *base_ / "mounted"; }

 private:
  Mount() : base_(std::make_unique<TempDir>()) { std::filesystem::create_directory(path()); }

  void finish(bool mounted) {
    mounted_ = mounted;
    if (!mounted)
      why_ = std::string("this machine does not let tests mount: ") + std::strerror(errno);
  }

  static std::string output_of(const std::string& command) {
    std::string text;
    if (FILE* pipe = ::popen(command.c_str(), "r")) {
      char piece[256];
      while (std::fgets(piece, sizeof piece, pipe)) text += piece;
      ::pclose(pipe);
    }
    while (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
  }

  std::unique_ptr<TempDir> base_;
  std::string device_;
  std::string why_;
  bool mounted_ = false;
};

#define ORLOP_SKIP_UNLESS_MOUNTED(mount) \
  if (!(mount).mounted()) GTEST_SKIP() << (mount).why()

}  // namespace orlop::nvme
