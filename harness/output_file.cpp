// Output files: links followed, regular files renamed over, everything else written into.
#include "harness/output_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <random>

namespace headrace::harness {
namespace {

namespace fs = std::filesystem;

Status error(const std::string& message) { return Status(Code::invalid_argument, message); }
std::string reason(int code) { return std::strerror(code); }

// Where a path leads.
struct Target {
    fs::path path;           // all links followed
    int descriptor = -1;     // the open file of this process that it names
    bool exists = false;     // and what is there
    bool replaceable = true;  // a regular file, or nothing
    struct stat info = {};
};

fs::path folder_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

// N of /proc/self/fd/N, where /dev/fd and /dev/stdout lead; -1 of any other path. To open such a path anew would write
// from the file's begin, to rename over what it leads to would lose what else is printed there.
int own_descriptor(const fs::path& path) {
    std::error_code failure;
    const std::string folder = fs::canonical(folder_of(path), failure).string(), name = path.filename().string();
    const std::string own = "/proc/" + std::to_string(getpid()) + "/";
    const bool lists_descriptors = folder == "/dev/fd" || (folder.starts_with(own) && folder.ends_with("/fd"));
    if (failure || !lists_descriptors || name.empty() || name.size() > 9) return -1;
    return name.find_first_not_of("0123456789") == std::string::npos ? std::stoi(name) : -1;
}

Status check_descriptor(const std::string& path, int descriptor) {
    const int flags = fcntl(descriptor, F_GETFL);
    if (flags == -1) return error(path + ": could not be opened: " + reason(errno));
    if ((flags & O_ACCMODE) == O_RDONLY) return error(path + ": could not be written: it is open for reading only");
    return {};
}

// Of a new file, or of one that is to be replaced.
Status check_folder(const std::string& path, const Target& target) {
    if (target.path.filename().empty()) return error(path + ": expected the name of a file");
    if (target.exists && access(target.path.c_str(), W_OK) != 0) {
        return error(path + ": could not be written: " + reason(errno));
    }
    const fs::path folder = folder_of(target.path);
    if (access(folder.c_str(), W_OK | X_OK) == 0) return {};
    return error(path + ": could not be created: " + reason(errno) + ": folder " + folder.string());
}

Status find_target(const std::string& path, Target* target) {
    constexpr int most_links = 40;  // as the kernel follows
    target->path = path;
    for (int links = 0; links <= most_links; ++links) {
        target->descriptor = own_descriptor(target->path);
        if (target->descriptor >= 0) return check_descriptor(path, target->descriptor);
        target->exists = lstat(target->path.c_str(), &target->info) == 0;
        if (!target->exists && errno != ENOENT) return error(path + ": could not be created: " + reason(errno));
        if (!target->exists || S_ISREG(target->info.st_mode)) return check_folder(path, *target);
        if (S_ISDIR(target->info.st_mode)) return error(path + ": could not be written: it is a folder");
        if (S_ISSOCK(target->info.st_mode)) return error(path + ": could not be written: it is a socket");
        target->replaceable = S_ISLNK(target->info.st_mode);
        if (!target->replaceable) return {};
        std::error_code failure;
        const fs::path next = fs::read_symlink(target->path, failure);
        if (failure) return error(path + ": could not be opened: " + failure.message());
        target->path = folder_of(target->path) / next;
    }
    return error(path + ": could not be opened: " + reason(ELOOP));
}

// Appends to an open file and closes it; remembers the first failure.
class Descriptor {
  public:
    explicit Descriptor(int descriptor) : descriptor_(descriptor), failure_(descriptor < 0 ? errno : 0) {}
    ~Descriptor() { close(); }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;

    void append(const void* data, std::size_t bytes) {
        const char* next = static_cast<const char*>(data);
        while (bytes > 0 && failure_ == 0) {
            const ssize_t written = ::write(descriptor_, next, bytes);
            if (written < 0 && errno != EINTR) failure_ = errno;
            if (written < 0) continue;
            next += written, bytes -= static_cast<std::size_t>(written);
        }
    }
    void set_owner_and_mode(const struct stat& info) {
        // only root may give a file away: then it is the writer's
        if (fchown(descriptor_, info.st_uid, info.st_gid) != 0 && errno != EPERM) failure_ = errno;
        if (fchmod(descriptor_, info.st_mode & 0777) != 0) failure_ = errno;
    }
    // 0, or the errno of the first failure.
    int close() {
        if (descriptor_ >= 0 && ::close(descriptor_) != 0 && failure_ == 0) failure_ = errno;
        descriptor_ = -1;
        return failure_;
    }

  private:
    int descriptor_, failure_;
};

std::atomic<const char*> doomed{nullptr};  // the temporary file that a signal removes

extern "C" void remove_and_die(int signal) {
    if (const char* path = doomed.load()) unlink(path);
    std::signal(signal, SIG_DFL);
    std::raise(signal);
}

// The name of a temporary file, which is removed at the end of its scope or by a signal that would end the process.
class Temporary {
  public:
    explicit Temporary(const fs::path& folder)
        : path_((folder / (".headrace" + std::to_string(std::random_device{}()) + ".tmp")).string()) {
        doomed = path_.c_str();
        for (std::size_t i = 0; i < std::size(signals); ++i) {
            struct sigaction action = {};
            sigaction(signals[i], nullptr, &before_[i]);
            action.sa_handler = remove_and_die;
            if (before_[i].sa_handler == SIG_DFL) sigaction(signals[i], &action, nullptr);
        }
    }
    ~Temporary() {
        unlink(path());  // gone where it was renamed
        for (std::size_t i = 0; i < std::size(signals); ++i) {
            if (before_[i].sa_handler == SIG_DFL) sigaction(signals[i], &before_[i], nullptr);
        }
        doomed = nullptr;
    }
    Temporary(const Temporary&) = delete;
    Temporary& operator=(const Temporary&) = delete;
    const char* path() const { return path_.c_str(); }

  private:
    static constexpr int signals[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM};
    std::string path_;
    struct sigaction before_[std::size(signals)];
};

Status write_into(const std::string& path, const Target& target, const std::function<void(const Append&)>& fill) {
    std::fflush(stdout);  // what was printed before stands before
    Descriptor file(target.descriptor >= 0 ? dup(target.descriptor)
                                           : open(target.path.c_str(), O_WRONLY | O_NOCTTY | O_CLOEXEC));
    fill([&](const void* data, std::size_t bytes) { file.append(data, bytes); });
    const int failure = file.close();
    return failure == 0 ? Status() : error(path + ": could not be written: " + reason(failure));
}

Status write_renamed(const std::string& path, const Target& target, const std::function<void(const Append&)>& fill) {
    const Temporary temporary(folder_of(target.path));
    const int descriptor = open(temporary.path(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, target.exists ? 0600 : 0666);
    if (descriptor < 0) return error(path + ": could not be created: " + reason(errno));
    Descriptor file(descriptor);
    if (target.exists) file.set_owner_and_mode(target.info);
    fill([&](const void* data, std::size_t bytes) { file.append(data, bytes); });
    int failure = file.close();
    if (failure == 0 && std::rename(temporary.path(), target.path.c_str()) != 0) failure = errno;
    return failure == 0 ? Status() : error(path + ": could not be written: " + reason(failure));
}

}  // namespace

Status write_file(const std::string& path, const std::function<void(const Append&)>& fill) {
    Target target;
    if (Status status = find_target(path, &target); !status.ok()) return status;
    const bool renamed = target.replaceable && target.descriptor < 0;
    return renamed ? write_renamed(path, target, fill) : write_into(path, target, fill);
}

Status write_text_file(const std::string& path, const std::string& text) {
    return write_file(path, [&](const Append& append) { append(text.data(), text.size()); });
}

Status can_write(const std::string& path) {
    Target target;
    return find_target(path, &target);
}

}  // namespace headrace::harness
