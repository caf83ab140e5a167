#include "fuse_mount.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <optional>
#include <vector>

namespace orlop::nvme {
namespace {

constexpr size_t kMostBytes = size_t{128} << 10;  // of one read or write

// Serves `directory`, which holds plain files only, on an open /dev/fuse.
class Server {
 public:
  Server(int device, std::string directory)
      : device_(device), directory_(std::move(directory)), buffer_(kMostBytes + 65536) {}

  // Until the file system is unmounted.
  void run() {
    while (true) {
      const ssize_t got = ::read(device_, buffer_.data(), buffer_.size());
      if (got < 0 && (errno == EINTR || errno == EAGAIN || errno == ENOENT)) continue;
      if (got < static_cast<ssize_t>(sizeof(fuse_in_header))) return;
      std::memcpy(&header_, buffer_.data(), sizeof header_);
      answer(buffer_.data() + sizeof header_);
    }
  }

 private:
  template <typename T>
  static T as(const char* body) {
    T value{};
    std::memcpy(&value, body, sizeof value);
    return value;
  }

  void answer(const char* body) {
    switch (header_.opcode) {
      case FUSE_INIT: {
        fuse_init_out out{};
        out.major = FUSE_KERNEL_VERSION;
        out.minor = FUSE_KERNEL_MINOR_VERSION;
        out.max_readahead = as<fuse_init_in>(body).max_readahead;
        out.max_write = kMostBytes;
        return reply(&out, sizeof out);
      }
      case FUSE_FORGET:
      case FUSE_BATCH_FORGET:
        return;
      case FUSE_LOOKUP: {
        const std::optional<fuse_entry_out> entry = entry_of(body);
        return entry ? reply(&*entry, sizeof *entry) : fail(ENOENT);
      }
      case FUSE_GETATTR:
      case FUSE_SETATTR:
        return answer_attributes(body);
      case FUSE_CREATE: {
        const auto in = as<fuse_create_in>(body);
        return answer_create(body + sizeof in, in);
      }
      case FUSE_OPEN:
      case FUSE_OPENDIR: {
        fuse_open_out out{};
        const int fd =
            ::open(path_of(header_.nodeid).c_str(), open_flags(as<fuse_open_in>(body).flags));
        if (fd < 0) return fail(errno);
        out.fh = static_cast<uint64_t>(fd);
        return reply(&out, sizeof out);
      }
      case FUSE_RELEASE:
      case FUSE_RELEASEDIR:
        ::close(static_cast<int>(as<fuse_release_in>(body).fh));
        return reply(nullptr, 0);
      case FUSE_FLUSH:
      case FUSE_FSYNC:
        return reply(nullptr, 0);
      case FUSE_READ:
        return answer_read(as<fuse_read_in>(body));
      case FUSE_WRITE: {
        const auto in = as<fuse_write_in>(body);
        const ssize_t done = ::pwrite(static_cast<int>(in.fh), body + sizeof in, in.size,
                                      static_cast<off_t>(in.offset));
        if (done < 0) return fail(errno);
        fuse_write_out out{};
        out.size = static_cast<uint32_t>(done);
        return reply(&out, sizeof out);
      }
      case FUSE_READDIR:
        return answer_names(as<fuse_read_in>(body));
      case FUSE_UNLINK:
        if (::unlink((directory_ + "/" + body).c_str()) != 0) return fail(errno);
        // A file of that name that comes later is another node.
        std::replace(names_.begin(), names_.end(), std::string(body), std::string("?"));
        return reply(nullptr, 0);
      case FUSE_STATFS:
        return answer_space();
      default:
        return fail(ENOSYS);
    }
  }

  void answer_attributes(const char* body) {
    const std::string path = path_of(header_.nodeid);
    if (header_.opcode == FUSE_SETATTR) {
      const auto in = as<fuse_setattr_in>(body);
      if ((in.valid & FATTR_SIZE) != 0 &&
          ::truncate(path.c_str(), static_cast<off_t>(in.size)) != 0)
        return fail(errno);
    }
    struct stat info {};
    if (::stat(path.c_str(), &info) != 0) return fail(errno);
    fuse_attr_out out{};
    out.attr = attributes(info, header_.nodeid);
    reply(&out, sizeof out);
  }

  void answer_create(const char* name, const fuse_create_in& in) {
    struct {
      fuse_entry_out entry;
      fuse_open_out open;
    } out{};
    const int fd = ::open((directory_ + "/" + name).c_str(), open_flags(in.flags) | O_CREAT, 0600);
    if (fd < 0) return fail(errno);
    out.entry = *entry_of(name);
    out.open.fh = static_cast<uint64_t>(fd);
    reply(&out, sizeof out);
  }

  void answer_read(const fuse_read_in& in) {
    std::vector<char> data(in.size);
    const ssize_t got =
        ::pread(static_cast<int>(in.fh), data.data(), data.size(), static_cast<off_t>(in.offset));
    return got < 0 ? fail(errno) : reply(data.data(), static_cast<size_t>(got));
  }

  // All names in one answer.
  void answer_names(const fuse_read_in& in) {
    std::vector<char> names;
    DIR* const entries = in.offset > 0 ? nullptr : ::opendir(directory_.c_str());
    while (const dirent* entry = entries == nullptr ? nullptr : ::readdir(entries)) {
      fuse_dirent head{};
      head.ino = entry->d_ino;
      head.off = 1;
      head.namelen = static_cast<uint32_t>(std::strlen(entry->d_name));
      head.type = entry->d_type;
      const size_t begin = names.size();
      names.resize(begin + FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + head.namelen));
      std::memcpy(names.data() + begin, &head, FUSE_NAME_OFFSET);
      std::memcpy(names.data() + begin + FUSE_NAME_OFFSET, entry->d_name, head.namelen);
    }
    if (entries != nullptr) ::closedir(entries);
    reply(names.data(), names.size());
  }

  void answer_space() {
    struct statvfs space {};
    if (::statvfs(directory_.c_str(), &space) != 0) return fail(errno);
    fuse_statfs_out out{};
    out.st.blocks = space.f_blocks;
    out.st.bfree = space.f_bfree;
    out.st.bavail = space.f_bavail;
    out.st.bsize = static_cast<uint32_t>(space.f_bsize);
    out.st.frsize = static_cast<uint32_t>(space.f_frsize);
    out.st.namelen = 255;
    reply(&out, sizeof out);
  }

  // The page cache, if any, is the kernel's on the other side.
  static int open_flags(uint32_t flags) {
    return static_cast<int>(flags & ~static_cast<uint32_t>(O_DIRECT | O_NOFOLLOW)) | O_CLOEXEC;
  }

  static fuse_attr attributes(const struct stat& info, uint64_t node) {
    fuse_attr attr{};
    attr.ino = node;
    attr.size = static_cast<uint64_t>(info.st_size);
    attr.blocks = static_cast<uint64_t>(info.st_blocks);
    attr.mode = info.st_mode;
    attr.nlink = 1;
    attr.blksize = 4096;
    return attr;
  }

  // Nodes are numbered from 2 in the order of their first look-up; the directory itself is 1.
  std::optional<fuse_entry_out> entry_of(const std::string& name) {
    struct stat info {};
    if (::stat((directory_ + "/" + name).c_str(), &info) != 0) return std::nullopt;
    size_t index = 0;
    while (index < names_.size() && names_[index] != name) ++index;
    if (index == names_.size()) names_.push_back(name);
    fuse_entry_out entry{};
    entry.nodeid = index + 2;
    entry.attr = attributes(info, entry.nodeid);
    return entry;
  }

  std::string path_of(uint64_t node) const {
    return node == FUSE_ROOT_ID ? directory_ : directory_ + "/" + names_.at(node - 2);
  }

  void reply(const void* body, size_t bytes) { send(0, body, bytes); }
  void fail(int error) { send(-error, nullptr, 0); }
  void send(int error, const void* body, size_t bytes) {
    fuse_out_header out{};
    out.len = static_cast<uint32_t>(sizeof out + bytes);
    out.error = error;
    out.unique = header_.unique;
    const std::array<iovec, 2> parts = {{{&out, sizeof out}, {const_cast<void*>(body), bytes}}};
    // A request that was interrupted takes no answer.
    static_cast<void>(::writev(device_, parts.data(), bytes > 0 ? 2 : 1) < 0);
  }

  const int device_;
  const std::string directory_;
  std::vector<char> buffer_;
  std::vector<std::string> names_;
  fuse_in_header header_{};
};

}  // namespace

FuseMount::FuseMount() {
  std::filesystem::create_directory(path());
  std::filesystem::create_directory(base_ / "served");
  const int device = ::open("/dev/fuse", O_RDWR | O_CLOEXEC);
  const std::string options =
      "fd=" + std::to_string(device) + ",rootmode=40000,user_id=0,group_id=0";
  if (device < 0 ||
      ::mount("orlop-test", path().c_str(), "fuse", MS_NOSUID | MS_NODEV, options.c_str()) != 0) {
    why_ = std::string("this machine does not let tests mount FUSE: ") + std::strerror(errno);
    if (device >= 0) ::close(device);
    return;
  }
  server_ = ::fork();
  if (server_ == 0) {
    Server(device, base_ / "served").run();
    ::_exit(0);
  }
  ::close(device);
}

FuseMount::~FuseMount() {
  if (!mounted()) return;
  ::umount2(path().c_str(), MNT_DETACH);
  ::kill(server_, SIGKILL);
  ::waitpid(server_, nullptr, 0);
}

}  // namespace orlop::nvme
