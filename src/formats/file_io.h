#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"
#include "formats/xxh3_stream.h"

namespace orlop {

// Whole transfers on files: interrupted and short system calls are continued, and no single call
// moves more than 1 GiB. Every failure is an Error(kIo) with path, offset, bytes wanted and, for
// writes, the bytes that the file system has free.

UniqueFd open_for_reading(const std::filesystem::path& path);

// Made new, or emptied when it exists.
UniqueFd open_for_writing(const std::filesystem::path& path);

size_t file_bytes(const UniqueFd& fd, const std::filesystem::path& path);

// Fills `out` from `offset`. A file that ends earlier is an Error(kInvalidData).
void read_at(const UniqueFd& fd, const std::filesystem::path& path, size_t offset,
             std::span<std::byte> out);

void write_at(const UniqueFd& fd, const std::filesystem::path& path, size_t offset,
              std::span<const std::byte> bytes);

// Takes the disk space of a file of `bytes`, so that a full disk shows before the first byte is
// written. Does nothing where the file system cannot.
void reserve_space(const UniqueFd& fd, const std::filesystem::path& path, size_t bytes);

// Until the bytes of the file are on stable storage.
void sync_file(const UniqueFd& fd, const std::filesystem::path& path);

// Until the names in the folder are on stable storage.
void sync_folder(const std::filesystem::path& folder);

// rename(2), then sync_folder() of the target's folder.
void rename_durably(const std::filesystem::path& from, const std::filesystem::path& to);

// Paths of what is in the folder, sorted.
std::vector<std::filesystem::path> list_folder(const std::filesystem::path& folder);

// The whole file; one of more than `max_bytes` is an Error(kInvalidData).
std::string read_text_file(const std::filesystem::path& path, size_t max_bytes);

// Writes `path`.tmp, syncs it and renames it: readers see the old text or the new one.
void write_text_file(const std::filesystem::path& path, std::string_view text);

// Continues `hash` with the bytes [begin, end) of the file.
void update_xxh3(Xxh3Stream& hash, const UniqueFd& fd, const std::filesystem::path& path,
                 size_t begin, size_t end);

}  // namespace orlop
