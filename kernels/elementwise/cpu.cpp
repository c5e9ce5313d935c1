// Runs an elementwise op's loop over the tensors of a call (cpu.h).
#include <algorithm>

#include "twinop/elementwise.h"
#include "twinop/elementwise/strided.h"
#include "twinop/math/convert.h"

namespace twinop::elementwise {
namespace {

// Elements below which a second thread costs more than it saves. Waking a pool takes 2 to 5 us, in
// which one core moves about 64 KiB.
constexpr std::int64_t kGrain = 1 << 15;

// Tensors that are not contiguous, or of a dtype other than the loop's, are computed in pieces that
// stay in the first-level cache.
constexpr std::int64_t kPieceBytes = 4096;

// A piece never spans rows of this length or more; it spans several shorter rows.
constexpr std::int64_t kLongRow = 256;

// ---------------------------------------------------------------------------------- contiguous

// Runs a loop over any number of contiguous elements. A remainder after the whole blocks is
// computed as a block that ends with the last element; fewer elements than a block are padded with
// zeros. The remainder is computed first and stored last, because an output may share its input's
// memory.
class Contiguous {
 public:
  Contiguous(const Loop& loop, const void* functor, int outputs, int inputs, std::size_t size)
      : loop_(loop), functor_(functor), outputs_(outputs), inputs_(inputs), size_(size) {}

  void operator()(void* const* out, const void* const* in, std::int64_t count) const {
    const std::int64_t rest = count % kBlock;
    if (rest == 0 || count <= kFew || loop_.is_scalar) return loop_.run(functor_, out, in, count);
    alignas(64) char results[kMaxOperands][kBlockBytes];
    void* last[kMaxOperands];
    for (int k = 0; k < outputs_; ++k) last[k] = results[k];
    const bool is_short = count < kBlock;
    const std::size_t bytes = static_cast<std::size_t>(is_short ? count : kBlock) * size_;
    const std::size_t offset = is_short ? 0 : static_cast<std::size_t>(count - kBlock) * size_;
    if (is_short) {
      alignas(64) char padded[kMaxOperands][kBlockBytes];
      const void* block[kMaxOperands];
      for (int k = 0; k < inputs_; ++k) {
        std::memset(padded[k] + bytes, 0, kBlock * size_ - bytes);
        block[k] = std::memcpy(padded[k], in[k], bytes);
      }
      loop_.run(functor_, last, block, kBlock);
    } else {
      const void* block[kMaxOperands];
      for (int k = 0; k < inputs_; ++k) block[k] = static_cast<const char*>(in[k]) + offset;
      loop_.run(functor_, last, block, kBlock);
      loop_.run(functor_, out, in, count - rest);
    }
    for (int k = 0; k < outputs_; ++k)
      std::memcpy(static_cast<char*>(out[k]) + offset, results[k], bytes);
  }

 private:
  static constexpr std::size_t kBlockBytes = kBlock * sizeof(double);

  const Loop& loop_;
  const void* functor_;
  const int outputs_, inputs_;
  const std::size_t size_;  // of an element
};

// ---------------------------------------------------------------------------------- copies

// Runs below this length are copied by a loop: a call of memcpy takes longer.
constexpr std::int64_t kShortRun = 16;

// A position in the call's order of elements: the coordinates, innermost first.
struct Position {
  std::int64_t at[kMaxRank];

  Position(std::int64_t element, int rank, const std::int64_t* sizes) {
    for (int d = 0; d < rank; ++d) {
      at[d] = element % sizes[d];
      element /= sizes[d];
    }
  }
  std::int64_t Offset(int rank, const std::int64_t* strides) const {
    std::int64_t offset = 0;
    for (int d = 0; d < rank; ++d) offset += at[d] * strides[d];
    return offset;
  }
  // Moves to the next row; returns the distance in an operand's memory.
  std::int64_t NextRow(int rank, const std::int64_t* sizes, const std::int64_t* strides) {
    std::int64_t distance = -at[0] * strides[0];
    at[0] = 0;
    for (int d = 1; d < rank; ++d) {
      distance += strides[d];
      if (++at[d] < sizes[d]) break;
      distance -= strides[d] * sizes[d];
      at[d] = 0;
    }
    return distance;
  }
};

// Elements of one size, whatever their type is.
template <class Bits>
struct [[gnu::may_alias]] Word {
  Bits bits;
};

template <class Word>
struct Fill {
  template <Level kLevel>
  TWINOP_INLINE static void Run(void* to, const void* value, std::int64_t count) {
    const Word word = *static_cast<const Word*>(value);
    for (std::int64_t i = 0; i < count; ++i) static_cast<Word*>(to)[i] = word;
  }
};
template <class Word>
void FillWith(void* to, const void* value, std::int64_t count) {
  ByLevel<Fill<Word>, void(void*, const void*, std::int64_t)>::Choose()(to, value, count);
}

// Copies `count` elements from `position` on between an operand and a contiguous buffer.
template <class Word, bool kGather>
void Copy(void* operand, void* buffer, Position position, std::int64_t count, int rank,
          const std::int64_t* sizes, const std::int64_t* strides) {
  const std::int64_t stride = strides[0];
  std::int64_t offset = position.Offset(rank, strides);
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t length = std::min(count - done, sizes[0] - position.at[0]);
    Word* const strided = static_cast<Word*>(operand) + offset;
    Word* const dense = static_cast<Word*>(buffer) + done;
    if (!kGather) {
      for (std::int64_t i = 0; i < length; ++i) strided[i * stride] = dense[i];
    } else if (stride == 0 && length >= kShortRun) {
      FillWith<Word>(dense, strided, length);
    } else if (stride == 1 && length >= kShortRun) {
      std::memcpy(dense, strided, static_cast<std::size_t>(length) * sizeof(Word));
    } else {
      for (std::int64_t i = 0; i < length; ++i) dense[i] = strided[i * stride];
    }
    done += length;
    offset += position.NextRow(rank, sizes, strides);
  }
}

// Calls body(Tag<Word>) with the word of an element's size.
template <class Body>
void WithWord(std::size_t size, const Body& body) {
  if (size == 1) return body(Tag<Word<std::uint8_t>>{});
  if (size == 2) return body(Tag<Word<std::uint16_t>>{});
  if (size == 4) return body(Tag<Word<std::uint32_t>>{});
  return body(Tag<Word<std::uint64_t>>{});
}

// ---------------------------------------------------------------------------------- pieces

// How a call is cut into pieces. It depends on the layout alone; the pool cuts between pieces.
struct Pieces {
  bool by_rows;
  std::int64_t piece;    // elements, at most
  std::int64_t segment;  // elements that are cut together: a row, or all of them
  std::int64_t each;     // pieces of a segment
  std::int64_t count;

  Pieces(std::int64_t numel, std::int64_t row, std::size_t compute_size)
      : by_rows(row >= kLongRow),
        piece(kPieceBytes / static_cast<std::int64_t>(compute_size)),
        segment(by_rows ? row : numel),
        each((segment + piece - 1) / piece),
        count(numel / segment * each) {}

  std::int64_t First(std::int64_t i) const { return i / each * segment + i % each * piece; }
  std::int64_t Grain() const { return kGrain / std::min(segment, piece) + 1; }
};

// A call whose operands pass through buffers where they are not contiguous or not of the loop's
// dtype.
class BufferedCall {
 public:
  BufferedCall(const Call& call, int outputs, int inputs, const Loop& loop, DType dtype,
               const void* functor)
      : outputs_(outputs),
        operands_(outputs + inputs),
        compute_size_(Info(dtype).size),
        run_(loop, functor, outputs, inputs, compute_size_),
        layout_(MakeLayout<kMaxOperands>(call, outputs, inputs)),
        pieces_(layout_.numel, layout_.sizes[0], std::max(compute_size_, sizeof(float))) {
    for (int k = 0; k < operands_; ++k) {
      const Tensor& tensor = k < outputs ? call.outputs[k] : call.inputs[k - outputs];
      data_[k] = tensor.as<char>();
      dtypes_[k] = tensor.dtype;
      sizes_[k] = Info(tensor.dtype).size;
      converts_[k] = tensor.dtype != dtype;
      contiguous_[k] = layout_.IsFlat(k);
      scalar_[k] = k >= outputs && layout_.IsScalar(k);
    }
  }

  void Run(const Context& context) const {
    context.ParallelFor(pieces_.count, pieces_.Grain(),
                        [this](std::int64_t begin, std::int64_t end) { RunPieces(begin, end); });
  }

 private:
  void RunPieces(std::int64_t begin, std::int64_t end) const {
    alignas(64) char buffers[kMaxOperands][kPieceBytes];
    for (int k = outputs_; k < operands_; ++k)
      if (scalar_[k]) FillScalar(k, buffers[k]);

    std::int64_t first = pieces_.First(begin);
    Position position(first, layout_.rank, layout_.sizes);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t rest =
          pieces_.by_rows ? layout_.sizes[0] - position.at[0] : layout_.numel - first;
      const std::int64_t count = std::min(pieces_.piece, rest);
      RunPiece(first, position, count, buffers);
      first += count;
      if (!pieces_.by_rows) {
        position = Position(first, layout_.rank, layout_.sizes);
      } else if (count < rest) {
        position.at[0] += count;
      } else {
        position.NextRow(layout_.rank, layout_.sizes, layout_.strides[0]);
      }
    }
  }

  void RunPiece(std::int64_t first, const Position& position, std::int64_t count,
                char (&buffers)[kMaxOperands][kPieceBytes]) const {
    char* memory[kMaxOperands];  // of the piece, where it is one run of the operand's memory
    void* values[kMaxOperands];  // of the piece, in the compute type
    for (int k = 0; k < operands_; ++k) {
      memory[k] = Run(k, first, position, count);
      const bool direct = memory[k] != nullptr && !converts_[k];
      values[k] = direct && !scalar_[k] ? memory[k] : buffers[k];
      if (k >= outputs_ && values[k] == buffers[k] && !scalar_[k])
        Read(k, memory[k], position, count, buffers[k]);
    }
    run_(values, values + outputs_, count);
    for (int k = 0; k < outputs_; ++k)
      if (values[k] == buffers[k]) Write(k, memory[k], position, count, buffers[k]);
  }

  // Returns the memory of `count` elements where it is contiguous, else null.
  char* Run(int k, std::int64_t first, const Position& position, std::int64_t count) const {
    const auto size = static_cast<std::int64_t>(sizes_[k]);
    if (contiguous_[k]) return data_[k] + first * size;
    if (layout_.strides[k][0] != 1 || position.at[0] + count > layout_.sizes[0]) return nullptr;
    return data_[k] + position.Offset(layout_.rank, layout_.strides[k]) * size;
  }

  void Read(int k, const char* memory, const Position& position, std::int64_t count,
            char* buffer) const {
    alignas(64) char gathered[kPieceBytes];
    if (memory == nullptr) CopyOperand<true>(k, position, count, converts_[k] ? gathered : buffer);
    if (converts_[k])
      Widen(dtypes_[k], memory != nullptr ? memory : gathered, reinterpret_cast<float*>(buffer),
            count);
  }

  void Write(int k, char* memory, const Position& position, std::int64_t count,
             char* buffer) const {
    alignas(64) char rounded[kPieceBytes];
    if (converts_[k])
      Round(dtypes_[k], reinterpret_cast<const float*>(buffer),
            memory != nullptr ? memory : rounded, count);
    if (memory == nullptr) CopyOperand<false>(k, position, count, converts_[k] ? rounded : buffer);
  }

  template <bool kGather>
  void CopyOperand(int k, const Position& position, std::int64_t count, char* buffer) const {
    WithWord(sizes_[k], [&](auto tag) {
      Copy<typename decltype(tag)::Type, kGather>(data_[k], buffer, position, count, layout_.rank,
                                                  layout_.sizes, layout_.strides[k]);
    });
  }

  void FillScalar(int k, char* buffer) const {
    const std::int64_t count = std::min(pieces_.piece, layout_.numel);
    const char* value = data_[k];
    float widened;
    if (converts_[k]) {
      Widen(dtypes_[k], value, &widened, 1);
      value = reinterpret_cast<const char*>(&widened);
    }
    WithWord(compute_size_,
             [&](auto tag) { FillWith<typename decltype(tag)::Type>(buffer, value, count); });
  }

  const int outputs_, operands_;
  const std::size_t compute_size_;  // of an element of the loop
  const Contiguous run_;
  const Layout<kMaxOperands> layout_;
  const Pieces pieces_;
  char* data_[kMaxOperands];
  DType dtypes_[kMaxOperands];
  std::size_t sizes_[kMaxOperands];
  bool converts_[kMaxOperands];
  bool contiguous_[kMaxOperands];
  bool scalar_[kMaxOperands];
};

}  // namespace

Status RunLoop(const Call& call, int outputs, int inputs, const Loop& loop, DType dtype,
               const void* functor) {
  bool is_direct = IsFlat(call, outputs, inputs);
  for (int k = 0; k < outputs; ++k) is_direct = is_direct && call.outputs[k].dtype == dtype;
  for (int k = 0; k < inputs; ++k) is_direct = is_direct && call.inputs[k].dtype == dtype;
  if (!is_direct) {
    BufferedCall(call, outputs, inputs, loop, dtype, functor).Run(*call.context);
    return {};
  }
  const std::size_t size = Info(dtype).size;
  const Contiguous contiguous(loop, functor, outputs, inputs, size);
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t offset = begin * static_cast<std::int64_t>(size);
    void* out[kMaxOperands];
    const void* in[kMaxOperands];
    for (int k = 0; k < outputs; ++k) out[k] = call.outputs[k].as<char>() + offset;
    for (int k = 0; k < inputs; ++k) in[k] = call.inputs[k].as<const char>() + offset;
    contiguous(out, in, end - begin);
  };
  const std::int64_t count = call.outputs[0].numel;
  if (count <= kGrain) {
    run(0, count);
    return {};
  }
  // Cut between blocks, wherever the frameworks' pools cut.
  call.context->ParallelFor((count + kBlock - 1) / kBlock, kGrain / kBlock,
                            [&](std::int64_t begin, std::int64_t end) {
                              run(begin * kBlock, std::min(end * kBlock, count));
                            });
  return {};
}

}  // namespace twinop::elementwise
