// Unpacks an LZ4 block, whose format github.com/lz4/lz4 describes.
#pragma once

#include <cstddef>

namespace twinop::aot_kernels {

// Fills `output` with what the block holds. Returns whether it holds as many bytes as that.
// Whatever the block's bytes are, it reads and writes inside the two.
inline bool UnpackLz4(const char* block, std::size_t block_size, char* output, std::size_t size) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(block);
  std::size_t at = 0, end = 0;  // in the block, in the output
  // A length whose first 4 bits are given; the rest follows if they are full.
  const auto length = [&](std::size_t start) {
    unsigned char byte = start == 15 ? 255 : 0;
    while (byte == 255 && at < block_size) start += byte = bytes[at++];
    return start;
  };
  while (at < block_size) {
    const unsigned token = bytes[at++];
    const std::size_t literals = length(token >> 4);
    if (literals > block_size - at || literals > size - end) return false;
    for (std::size_t i = 0; i < literals; ++i) output[end++] = block[at++];
    if (at == block_size) return end == size;  // the last sequence has literals alone
    if (block_size - at < 2) return false;
    const std::size_t offset = bytes[at] + std::size_t{256} * bytes[at + 1];
    at += 2;
    const std::size_t copied = length(token & 15) + 4;
    if (offset == 0 || offset > end || copied > size - end) return false;
    for (std::size_t i = 0; i < copied; ++i, ++end) output[end] = output[end - offset];
  }
  return false;
}

}  // namespace twinop::aot_kernels
