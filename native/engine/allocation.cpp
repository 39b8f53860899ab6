#include "engine/allocation.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <exception>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "common/error.h"
#include "common/thread.h"

namespace aioflagcx::engine {

namespace {

#ifndef MFD_NOEXEC_SEAL  // linux/memfd.h of Linux 6.3
constexpr unsigned MFD_NOEXEC_SEAL = 0x0008;
#endif

#ifndef MADV_POPULATE_WRITE  // sys/mman.h of Linux 5.14
constexpr int MADV_POPULATE_WRITE = 23;
#endif

// The process's address space is locked while pages are mapped and unmapped, so that other threads
// that map memory wait. Hence bytes at once, about 0.5 ms, and the shortest sleep in between, for
// without one the lock is taken again before a waiting thread has woken up.
constexpr std::uint64_t kMapStep = 4 << 20;
constexpr std::chrono::nanoseconds kMapPause{1};

// Frees mappings on a thread of its own, which is there only while there are some: the last holder
// is often an event loop, and giving back the pages of 100 GB takes seconds.
class Reaper {
  public:
    // Never destroyed, as its thread may outlive main().
    static Reaper& process() {
        static Reaper& reaper = *std::make_unique<Reaper>().release();
        return reaper;
    }

    void take(Allocation::Mapping mapping) noexcept {
        if (::getpid() != pid_) return;  // a forked child has not the thread: freed right here
        try {
            const std::lock_guard lock(mutex_);
            if (!running_) {
                // It needs the mutex, so it finds the mapping.
                start_thread("afx-unmap", [this] { run(); }).detach();
                running_ = true;
            }
            waiting_.push_back(std::move(mapping));
        } catch (const std::exception&) {
            // No memory or no thread for it: freed right here.
        }
    }

    void settle() {
        if (::getpid() != pid_) return;
        std::unique_lock lock(mutex_);
        settled_.wait(lock, [this] { return !running_; });
    }

  private:
    void run() {
        std::unique_lock lock(mutex_);
        while (!waiting_.empty()) {
            {
                const Allocation::Mapping mapping = std::move(waiting_.front());
                waiting_.pop_front();
                lock.unlock();
            }
            lock.lock();
        }
        running_ = false;
        settled_.notify_all();
    }

    const pid_t pid_ = ::getpid();
    std::mutex mutex_;  // guards all below; a leaf
    std::condition_variable settled_;
    std::deque<Allocation::Mapping> waiting_;
    bool running_ = false;
};

// Every allocation of the process, by address.
class Directory {
  public:
    // Never destroyed, as allocations may outlive main().
    static Directory& process() {
        static Directory& directory = *std::make_unique<Directory>().release();
        return directory;
    }

    void add(const std::shared_ptr<Allocation>& allocation) {
        const std::lock_guard lock(mutex_);
        by_addr_[allocation->addr()] = allocation;
    }
    void remove(std::uint64_t addr) noexcept {
        const std::lock_guard lock(mutex_);
        by_addr_.erase(addr);
    }
    std::shared_ptr<Allocation> holding(std::uint64_t addr, std::uint64_t size) {
        std::shared_ptr<Allocation> found;
        {
            const std::lock_guard lock(mutex_);
            const auto after = by_addr_.upper_bound(addr);
            if (after != by_addr_.begin()) found = std::prev(after)->second.lock();
        }
        // Let go of only now: when it is the last reference, the destructor takes the lock.
        const bool holds =
            found && size <= found->size() && addr - found->addr() <= found->size() - size;
        return holds ? found : nullptr;
    }

  private:
    std::mutex mutex_;  // guards by_addr_; a leaf
    std::map<std::uint64_t, std::weak_ptr<Allocation>> by_addr_;
};

UniqueFd create_file(bool huge_pages) {
    const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING | (huge_pages ? MFD_HUGETLB : 0u);
    // Not executable, which some systems demand (sysctl vm.memfd_noexec) and old ones do not know.
    int fd = ::memfd_create("aioflagcx-alloc", flags | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) fd = ::memfd_create("aioflagcx-alloc", flags);
    if (fd < 0) throw NativeError("memfd_create", errno, huge_pages ? "huge pages" : "");
    return UniqueFd(fd);
}

std::uint64_t page_size(int fd, bool huge_pages) {
    if (!huge_pages) return static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    struct stat status{};
    if (::fstat(fd, &status) != 0) throw NativeError("fstat", errno, "memfd");
    return static_cast<std::uint64_t>(status.st_blksize);
}

// Signals interrupt fallocate(2), which then starts anew: a profiler's timer could keep it from
// ever getting through.
class BlockSignals {
  public:
    BlockSignals() noexcept {
        sigset_t all;
        ::sigfillset(&all);
        ::pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~BlockSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    BlockSignals(const BlockSignals&) = delete;
    BlockSignals& operator=(const BlockSignals&) = delete;

  private:
    sigset_t before_;
};

}  // namespace

Allocation::Mapping::Mapping(Mapping&& other) noexcept
    : data(std::exchange(other.data, nullptr)),
      size(std::exchange(other.size, 0)),
      page(other.page),
      fd(std::move(other.fd)) {}

Allocation::Mapping::~Mapping() {
    const std::uint64_t step = std::max(kMapStep, page);
    for (std::uint64_t done = 0; done < size; done += step) {
        ::munmap(data + done, std::min(step, size - done));
        if (done + step < size) std::this_thread::sleep_for(kMapPause);
    }
}

Allocation::Allocation(std::uint64_t size, Mapping mapping) noexcept
    : pid_(::getpid()), size_(size), mapping_(std::move(mapping)) {}

std::shared_ptr<Allocation> Allocation::make(std::uint64_t size, bool huge_pages) {
    Reaper::process().settle();
    Mapping mapping;
    mapping.fd = create_file(huge_pages);
    const int fd = mapping.fd.get();
    const std::uint64_t page = mapping.page = page_size(fd, huge_pages);
    const std::string detail =
        std::to_string(size) + " bytes in pages of " + std::to_string(page) + " bytes";
    if (size == 0 || size > INT64_MAX - page) throw NativeError("ftruncate", EINVAL, detail);
    const std::uint64_t whole = (size + page - 1) / page * page;
    if (::ftruncate(fd, static_cast<off_t>(whole)) != 0) {
        throw NativeError("ftruncate", errno, detail);
    }
    if (::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        throw NativeError("fcntl", errno, "F_ADD_SEALS");
    }
    void* data = ::mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) throw NativeError("mmap", errno, detail);
    mapping.data = static_cast<std::byte*>(data);
    mapping.size = whole;
    std::shared_ptr<Allocation> made(new Allocation(size, std::move(mapping)));
    Directory::process().add(made);
    return made;
}

std::shared_ptr<Allocation> Allocation::holding(std::uint64_t addr, std::uint64_t size) {
    return Directory::process().holding(addr, size);
}

Allocation::~Allocation() {
    // In a forked child the directory's lock may be held by a thread that is not there.
    if (::getpid() == pid_) Directory::process().remove(addr());
    Reaper::process().take(std::move(mapping_));
}

void Allocation::populate(std::uint64_t offset, std::uint64_t length) {
    if (offset >= mapped()) return;
    length = std::min(length, mapped() - offset);
    const BlockSignals blocked;
    while (::fallocate(fd(), 0, static_cast<off_t>(offset), static_cast<off_t>(length)) != 0) {
        if (errno == EINTR) continue;
        throw NativeError("fallocate", errno,
                          std::to_string(length) + " bytes at " + std::to_string(offset) + " of " +
                              std::to_string(mapped()));
    }
    const std::uint64_t step = std::max(kMapStep, page());
    for (std::uint64_t done = 0; done < length; done += step) {
        // Where Linux does not know this, pages are mapped as they are touched.
        if (::madvise(mapping_.data + offset + done, std::min(step, length - done),
                      MADV_POPULATE_WRITE) != 0) {
            break;
        }
        std::this_thread::sleep_for(kMapPause);
    }
}

}  // namespace aioflagcx::engine
