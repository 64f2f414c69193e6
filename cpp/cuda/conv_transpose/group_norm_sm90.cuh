// SPDX-License-Identifier: Apache-2.0
/// \file
/// GroupNorm inside conv_transpose_relu_group_norm_sm90, by warps that do not multiply.
///
/// Each half tile's store is followed by an arrival at its sample's counter. Once all have arrived, some
/// warps merge the partial moments of the sample's groups (finalize_sm90.cuh); once all groups are in the
/// table, the sample is normalized, as a rule in place, in items that are spread over all blocks. While tiles
/// remain to be computed, a warp only takes what is ready; after that it waits. Blocks thus wait for each
/// other, so the launch is cooperative: all of them are on the card.
///
/// Where y is all that is wanted, a block keeps the last tile that it computes in shared memory and
/// normalizes it from there: memory never sees it before. Samples that such tiles may belong to have shares
/// of tiles as items, so that everyone else can leave those out.
///
/// Which block and warp does a piece of this work depends on timing; its result does not.
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include "cutlass/arch/barrier.h"

#include "cuda/activation.cuh"
#include "cuda/conv_transpose/after_sm90.cuh"
#include "cuda/conv_transpose/drain_sm90.cuh"
#include "cuda/conv_transpose/finalize_sm90.cuh"
#include "cuda/conv_transpose/kernel_params_sm90.cuh"
#include "cuda/conv_transpose/tiles_sm90.cuh"

namespace upconv3d::cuda {

/// The same at `pending`, unless null, which it then becomes: once all but the last OPEN groups of lane 0's
/// TMA stores are written, not just read: who normalizes reads them through L2.
template <int OPEN>
CUTLASS_DEVICE void arrive_stored(int*& pending) {
  if (pending == nullptr) return;
  if (threadIdx.x % 32 == 0) {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(OPEN) : "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  arrive_release(pending);
  pending = nullptr;
}

/// Stores evict-first if `valid`: by a predicate, since of a branch the compiler makes copies of what it
/// stores.
CUTLASS_DEVICE void store_if(bool valid, uint4* to, uint4 const& v) {
  asm volatile(
      "{\n.reg .pred valid;\nsetp.ne.b32 valid, %0, 0;\n"
      "@valid st.global.cs.v4.u32 [%1], {%2, %3, %4, %5};\n}" ::"r"(int(valid)),
      "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}

/// Where a block keeps its last tile: its drain warps, whose memory that takes, leave the items to the
/// consumers, and hand over those that they hold.
struct KeptTileBarrier {
  static constexpr int kThreads = 32 * (kConsumerWarps + 2);
  static constexpr int kId = 2;
  CUTLASS_DEVICE static void arrive() { cutlass::arch::NamedBarrier::arrive(kThreads, kId); }
  CUTLASS_DEVICE static void sync() { cutlass::arch::NamedBarrier::sync(kThreads, kId); }
};

/// \tparam FINALIZES whether this warp is the block's one that merges moments
template <class Traits, bool FINALIZES>
class GroupNormWorker {
 public:
  using Params = KernelParams<Traits>;
  using Slab = KernelSlab<Traits>;
  using Stored = typename Traits::Stored;
  using Output = typename Traits::Output;

  static constexpr int kVector = 16 / int(sizeof(Stored));  // values of 16 bytes
  static constexpr int kChunks = Traits::BLK_K / kVector;   // of a position of an item

  static constexpr int kItemsPerTile = Traits::ITEMS_PER_TILE;
  static constexpr int kPanelBytes = Traits::ITEM_POS * 128;  // of an item
  static constexpr int kKeptOfLane = int(kMaxKeepers) / 32;
  static_assert(kMaxKeepers % 32 == 0);

  /// \param items this warp's barriers
  CUTLASS_DEVICE GroupNormWorker(Params const& params, ControlStorage<Traits>& control,
                                 RingBarriers<Traits::ITEM_BUFFERS>& items)
      : params_(params), control_(control), items_(items), finalizer_(params, control) {
    int const chunk = int(threadIdx.x % 32 % kChunks);
    channel_ = params.item_fold > 1 ? chunk * kVector % params.k : chunk * kVector;
    int const boxes = cutlass::ceil_div(params.item_rows, Traits::ITEM_POS) * params.k_tiles.divisor;
    boxes_per_sample_ = cutlass::FastDivmod(boxes);
    boxes_ = boxes * first_of_tiles();
    all_items_ =
        boxes_ + params.order_per_sample.divisor * kItemsPerTile * (params.samples - first_of_tiles());
    // Of a tile per block each keeps its own.
    if (Traits::KEEPS_TILE && params.first_kept == 0 && params.order_size <= int(gridDim.x)) all_items_ = 0;
  }

  /// Merges moments and normalizes until nothing is left: while one item is normalized, TMA
  /// brings the next ones. A load takes long while the operands' loads keep the memory system busy.
  ///
  /// \param buffers [ITEM_BUFFERS] [BLK_K/panel channels][ITEM_POS][panel channels] Stored, swizzled
  /// \param kept    null, or the last tile as it is staged, which its block keeps: each warp that multiplied
  ///                normalizes an item of it, once its sample can be
  CUTLASS_DEVICE void run(char* buffers, char const* kept = nullptr) {
    Item items[Traits::ITEM_BUFFERS];
    int loading = 0;
    for (;;) {
      // That a later sample is final says nothing of this one, but that it is time to ask.
      bool const asks = kept != nullptr && (loading == 0 || control_.last_tile.n < ready_samples_);
      bool const has_kept = asks && is_final(control_.last_tile.n);
      // Once the last tile is handed out, others wait for what this warp merges.
      bool const takes = !has_kept && (!FINALIZES || finalizer_.done() || !finalizer_.hurries());
      for (Item item; takes && loading < Traits::ITEM_BUFFERS && take(item); ++loading) {
        start(item, items, buffers);
      }
      bool const idle = !has_kept && loading == 0;
      if (!idle) finish(items, buffers, has_kept ? kept : nullptr);
      if (has_kept) {
        kept = nullptr;
      } else if (!idle) {
        --loading;
      }
      bool finalizes = false, all_final = true;
      if constexpr (FINALIZES) {
        finalizes = finalizer_.step();
        all_final = finalizer_.done();
      }
      if (idle && !finalizes) {
        if (done_ && all_final && kept == nullptr) return;
        __nanosleep(kPollNanoseconds);
      }
    }
  }

  /// The item that this warp will come to, or -1: as lane 0 knows it.
  CUTLASS_DEVICE int held_item() const { return asked_ ? ticket_ : -1; }
  /// The same, to be taken before any other.
  CUTLASS_DEVICE void begin_with(int item) {
    asked_ = item >= 0;
    ticket_ = item;
  }

  /// Normalizes items that are ready now, `most` of them at most; waits for no others.
  CUTLASS_DEVICE void run_ready(char* buffers, int most) {
    Item items[Traits::ITEM_BUFFERS];
    for (int loading = 0;;) {
      for (Item item; loading < Traits::ITEM_BUFFERS && most > 0 && take(item, most); --most) {
        start(item, items, buffers);
        ++loading;
      }
      if (loading == 0) return;
      finish(items, buffers, nullptr);
      --loading;
    }
  }

 private:
  /// ITEM_POS positions x BLK_K channels of a sample. As a rule they lie next to each other in memory; of few
  /// channels, ITEM_POS rows of item_fold positions do. With Stepped16 they are a share of a tile, since
  /// values have a meaning only together with their tile's steps; so they are where some tiles are kept,
  /// which no item of another tile may touch.
  struct Item {
    int sample;
    int slab;      // of tiles only; of a pair the first, whose positions and the second's the item has
    int channel;   // first
    int position;  // first, in [Z,P,Q], or row; of tiles: within the slab, perhaps beyond it
  };
  /// The first sample whose items are shares of tiles.
  CUTLASS_DEVICE int first_of_tiles() const {
    if constexpr (Traits::QUANTIZED) return 0;
    return Traits::KEEPS_TILE ? params_.first_kept : params_.samples;
  }

  /// Has the item brought to the next buffer.
  CUTLASS_DEVICE void start(Item const& item, Item (&items)[Traits::ITEM_BUFFERS], char* buffers) {
    set(items, load_.slot, item);
    load_item(item, load_.slot, buffers);
    load_.advance(Traits::ITEM_BUFFERS);
  }
  /// Normalizes the item that was started first; or, unless null, the warp's share of the tile that the block
  /// keeps. One call for both: each is a copy of what is called.
  CUTLASS_DEVICE void finish(Item const (&items)[Traits::ITEM_BUFFERS], char* buffers, char const* kept) {
    Item item;
    char const* from;
    if (kept != nullptr) {
      TileCoord const tile = control_.last_tile;
      int const first = int(threadIdx.x / 32 % kConsumerWarps) * Traits::ITEM_POS;
      item = {tile.n, tile.slab, tile.channel, tile.position + first};
      from = kept + first * 128;
    } else {
      items_.wait_full(use_);
      item = get(items, use_.slot);
      from = buffers + use_.slot * Traits::ITEM_BYTES;
    }
    normalize_loaded(item, from, kept != nullptr ? Traits::WG_STAGING_BYTES : kPanelBytes);
    if (kept != nullptr) return;
    __syncwarp();  // before TMA overwrites what was read
    use_.advance(Traits::ITEM_BUFFERS);
  }

  /// Register arrays take constant indices only.
  CUTLASS_DEVICE static void set(Item (&items)[Traits::ITEM_BUFFERS], int slot, Item const& item) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Traits::ITEM_BUFFERS; ++i) {
      if (i == slot) items[i] = item;
    }
  }
  CUTLASS_DEVICE static Item get(Item const (&items)[Traits::ITEM_BUFFERS], int slot) {
    Item item = items[0];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 1; i < Traits::ITEM_BUFFERS; ++i) {
      if (i == slot) item = items[i];
    }
    return item;
  }

  /// Takes the item held, if it can be normalized now, or else the next one that is not to be left out. Items
  /// are handed out one by one, in the order of the samples.
  ///
  /// \param most items that it may leave out, each of which costs asking for another; if all were, none is
  ///             taken
  CUTLASS_DEVICE bool take(Item& item, int most = INT_MAX) {
    if (!asked_) ask();
    asked_ = true;
    for (; !done_ && most > 0; --most) {
      int const held = __shfl_sync(0xffffffffu, ticket_, 0);
      if (!sample_ready(held)) return false;
      ask();
      item = item_of(held);
      if (!is_left_out(item)) return true;
    }
    return false;
  }
  CUTLASS_DEVICE int sample_of(int held) const {
    if (Traits::QUANTIZED || held >= boxes_) {
      return params_.order_per_sample.div((held - boxes_) / kItemsPerTile) + first_of_tiles();
    }
    return boxes_per_sample_.div(held);
  }
  /// Item `held` of all: of a sample the latest first, which of one that does not fit L2 are what is left
  /// there.
  CUTLASS_DEVICE Item item_of(int held) const {
    Item item;
    int index, k_tile;
    if (Traits::QUANTIZED || held >= boxes_) {
      int const share = kItemsPerTile - 1 - (held - boxes_) % kItemsPerTile;
      item.sample = params_.order_per_sample.divmod(index, (held - boxes_) / kItemsPerTile);
      item.sample += first_of_tiles();
      TileCoord const tile = tile_at(item.sample, params_.order_per_sample.divisor - 1 - index);
      item.slab = tile.slab;
      item.channel = tile.channel;
      item.position = tile.position + share * Traits::ITEM_POS;
    } else {
      item.sample = boxes_per_sample_.divmod(index, held);
      item.slab = 0;
      item.position =
          params_.k_tiles.divmod(k_tile, boxes_per_sample_.divisor - 1 - index) * Traits::ITEM_POS;
      item.channel = tile_channel(params_, k_tile);
    }
    return item;
  }
  /// The tile that has place `local` of a sample in the launch order.
  CUTLASS_DEVICE TileCoord tile_at(int sample, int local) const {
    if (params_.window_tiles > 0) return tile_of_windows(params_, sample, local);
    // Lanes search the slabs side by side: their parameters lie in constant memory, where one after the
    // other would cost more than normalizing does.
    int const lane = slab_lane<Traits>();
    bool const begins = lane < params_.tile_slabs && local >= control_.first_tile[lane];
    int const slab = __popc(__ballot_sync(0xffffffffu, begins)) - 1;
    int k_tile;
    int const pos_tile = params_.k_tiles.divmod(k_tile, local - control_.first_tile[slab]);
    return {sample, slab, tile_channel(params_, k_tile), pos_tile * Traits::BLK_POS};
  }
  /// Whether the item is a share of an empty place in launch order, which has as many as a tile, or of a tile
  /// that the block which computed it normalizes. Its sample is final.
  CUTLASS_DEVICE bool is_left_out(Item const& item) const {
    if (item.sample < first_of_tiles()) return false;
    int const tile_position = item.position / Traits::BLK_POS * Traits::BLK_POS;
    if (params_.window_tiles > 0 && tile_position >= params_.slabs[item.slab].positions) return true;
    if constexpr (!Traits::KEEPS_TILE) return false;
    if (item.sample < params_.first_kept) return false;
    // Of any position in the tile.
    int const tile = index_of_tile(params_, {item.sample, item.slab, item.channel, item.position});
    bool found = false;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kKeptOfLane; ++i) found = found || kept_tiles_[i] == tile + 1;
    return __any_sync(0xffffffffu, found);
  }

  /// Asks for an item, which is here when it is needed.
  CUTLASS_DEVICE void ask() {
    if (threadIdx.x % 32 == 0) ticket_ = atomicAdd(params_.next_item, 1);
  }

  /// Whether the item's sample can be normalized; sets done_ where there is no such item.
  CUTLASS_DEVICE bool sample_ready(int item) {
    if (item >= all_items_) {
      done_ = true;
      return false;
    }
    int const sample = sample_of(item);
    if (sample < ready_samples_) return true;
    if (!is_final(sample)) return false;
    // What the counter says was written, TMA may now read too.
    asm volatile("fence.proxy.async;" ::: "memory");
    ready_samples_ = sample + 1;
    if constexpr (Traits::KEEPS_TILE) {
      if (sample >= params_.first_kept) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kKeptOfLane; ++i) {
          kept_tiles_[i] = __ldcg(params_.kept + 32 * i + threadIdx.x % 32);
        }
      }
    }
    return true;
  }
  /// Whether all groups of a sample are in the table. Those of an earlier one may not be.
  CUTLASS_DEVICE bool is_final(int sample) const {
    int const merged = __shfl_sync(0xffffffffu, load_acquire(params_.finalized + sample), 0);
    __syncwarp();
    return merged >= params_.merge_steps;
  }

  /// maps_ for the chunk of channels from `channel` on: as a rule the same as for the last item.
  CUTLASS_DEVICE void load_maps(int sample, int channel) {
    if (maps_sample_ == sample && maps_channel_ == channel) return;
    maps_sample_ = sample;
    maps_channel_ = channel;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) {
      int unused;
      int const group = params_.group_channels.divmod(unused, channel + i);
      maps_[i] = channel_map<Traits>(
          params_, __ldcg(params_.table + std::int64_t(sample) * params_.groups + group), channel + i);
      if constexpr (sizeof(Stored) == 2) maps_[i].shift -= maps_[i].mean * maps_[i].scale;
    }
  }

  /// Steps of a chunk of channels, which is 8 bytes.
  CUTLASS_DEVICE void load_steps(int sample, int moment, int channel, float (&step)[kVector]) const {
    static_assert(!Traits::QUANTIZED || kVector == 8);
    std::int8_t const* const from =
        params_.steps + (std::int64_t(sample) * params_.moments + moment) * params_.step_pitch + channel;
    uint2 const word = __ldcg(reinterpret_cast<uint2 const*>(from));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) {
      step[i] = step_value(int(((i < 4 ? word.x : word.y) << (24 - i % 4 * 8))) >> 24);
    }
  }

  /// Starts the load of an item. What lies beyond the sample or slab is not used.
  CUTLASS_DEVICE void load_item(Item const& item, int slot, char* buffers) {
    if (threadIdx.x % 32 != 0) return;
    constexpr int kPanel = kPanelChannels<Stored>;
    std::uint64_t* const barrier = items_.expect(slot, Traits::ITEM_BYTES);
    char* const to = buffers + slot * Traits::ITEM_BYTES;
    CUTLASS_PRAGMA_UNROLL
    for (int panel = 0; panel < Traits::BLK_K / kPanel; ++panel) {
      int channel = Drain<Traits>::stored_channel(params_, item.channel, item.channel) + panel * kPanel;
      if (item.sample >= first_of_tiles()) {
        int const index = slab_of_warpgroup(params_, item.slab, panel * kPanel / 64);
        if (Traits::PAIRED) channel -= panel * kPanel / 64 * 64;
        Slab const& slab = params_.slabs[index];
        // An im2col load must begin inside the slab, also that of an item which lies beyond it whole.
        int q, p;
        int const z = slab.height.divmod(p, slab.width.divmod(q, min(item.position, slab.positions - 1)));
        cute::SM90_TMA_LOAD_IM2COL_5D::copy(&params_.maps[index].item, barrier, to + panel * kPanelBytes,
                                            channel, q, p, z, item.sample, std::uint16_t(0), std::uint16_t(0),
                                            std::uint16_t(0));
      } else if constexpr (!Traits::QUANTIZED) {
        cute::SM90_TMA_LOAD_3D::copy(&params_.item, barrier,
                                     std::uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST),
                                     to + panel * kPanelBytes, channel, item.position, item.sample);
      }
    }
  }

  /// y of an item that load_item has brought, or that was staged. One branch, here: these warps are bound by
  /// what they issue.
  ///
  /// \param panel_bytes from one panel of channels to the next
  CUTLASS_DEVICE void normalize_loaded(Item const& item, char const* buffer, int panel_bytes) {
    Activation const after = params_.after.kind;
    if (after == Activation::kNone) {
      normalize_loaded<NoActivation>(item, buffer, panel_bytes);
    } else if (after == Activation::kRelu) {
      normalize_loaded<ReluActivation>(item, buffer, panel_bytes);
    } else {
      normalize_loaded<SlopeActivation>(item, buffer, panel_bytes);
    }
  }
  template <class After>
  CUTLASS_DEVICE void normalize_loaded(Item const& item, char const* buffer, int panel_bytes) {
    constexpr int kRows = 32 / kChunks;  // positions that a warp takes at once
    // Positions of a lane that are worked on side by side: shared memory answers late while wgmma reads it.
    constexpr int kBatch = 4;
    static_assert(Traits::ITEM_POS % (kRows * kBatch) == 0 && Traits::ITEM_POS <= 32);
    int lane = threadIdx.x % 32;
    asm volatile("" : "+r"(lane));  // as in StagedTile::stage_half
    int const chunk = lane % kChunks;
    bool const of_tile = item.sample >= first_of_tiles();
    int const fold = Traits::QUANTIZED || of_tile ? 1 : params_.item_fold;
    // Of the second phase of a pair, which has the tile's other 64 rows.
    bool const second = Traits::PAIRED && of_tile && chunk * kVector >= 64;
    int const at = item.channel + chunk * kVector - (second ? 64 : 0);  // in a row of fold*K values
    int const channel = fold > 1 ? channel_ : at;
    bool const inside = at < channel_end(params_, item.channel) * fold;
    if (inside) load_maps(item.sample, channel);
    float slope[kVector];  // not in maps_, which are kept while moments are merged
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) {
      bool const used = std::is_same_v<After, SlopeActivation> && inside;
      slope[i] = used ? activation_parameter<Output>(params_.after, channel + i) : 0.f;
    }
    int count, pixel;  // a lane finds one position's place, for all
    float step[kVector];
    if (of_tile) {
      Slab const& first_slab = params_.slabs[item.slab];
      Slab const& slab = params_.slabs[slab_of_warpgroup(params_, item.slab, int(second))];
      count = inside ? slab.positions - item.position : 0;
      pixel = pixel_of(params_, first_slab, min(item.position + lane, first_slab.positions - 1));
      if constexpr (Traits::QUANTIZED) {
        if (count > 0) {
          load_steps(item.sample, slab.first_moment + item.position / Traits::STAGED_POS, channel, step);
        }
      }
    } else {
      count = inside ? params_.item_rows - item.position : 0;
      pixel = item.position + lane;
    }
    std::int64_t const sample = item.sample * std::int64_t(Drain<Traits>::pixels(params_));
    Output* const to = params_.y + (sample + (second ? params_.pair_pixels : 0)) * params_.k + at;
    char const* const panel = buffer + chunk / 8 * panel_bytes;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = lane / kChunks; first - lane / kChunks < Traits::ITEM_POS; first += kRows * kBatch) {
      uint4 in[kBatch];
      int row_pixel[kBatch];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        int const row = first + i * kRows;
        row_pixel[i] = __shfl_sync(0xffffffffu, pixel, row);
        in[i] = *reinterpret_cast<uint4 const*>(panel + row * 128 + ((chunk % 8) ^ (row % 8)) * 16);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        store_normalized<After>(in[i], step, slope, to + std::int64_t(row_pixel[i]) * (fold * params_.k),
                                first + i * kRows < count);
      }
    }
  }

  /// The chunk `in` through maps_ and After, stored if `valid`.
  template <class After>
  CUTLASS_DEVICE void store_normalized(uint4 const& in, float const (&step)[kVector],
                                       float const (&slope)[kVector], Output* to, bool valid) const {
    auto const& values = reinterpret_cast<cutlass::Array<Stored, kVector> const&>(in);
    cutlass::Array<float, kVector> result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) {
      ChannelMapSm90<Stored> map = maps_[i];
      if constexpr (Traits::QUANTIZED) map.scale *= step[i];
      result[i] = map(stored_to_float(values[i], params_.stepped_zero));
    }
    auto const out = activated<After, Output>(result, slope);
    CUTLASS_PRAGMA_UNROLL
    for (int word = 0; word < kVector * int(sizeof(Output)) / 16; ++word) {
      store_if(valid, reinterpret_cast<uint4*>(to) + word, reinterpret_cast<uint4 const*>(&out)[word]);
    }
  }

  Params const& params_;
  ControlStorage<Traits>& control_;
  RingBarriers<Traits::ITEM_BUFFERS>& items_;
  RingCursor load_, use_;             // buffers
  GroupFinalizer<Traits> finalizer_;  // FINALIZES only
  cutlass::FastDivmod boxes_per_sample_;
  int boxes_;                             // items that are no shares of tiles, of all blocks
  int all_items_;                         // of all samples and blocks
  int ticket_ = 0;                        // lane 0: the item handed out last, perhaps on its way
  int kept_tiles_[kKeptOfLane];           // a lane's of params.kept, those of ready_samples_ among them
  int ready_samples_ = 0;                 // known to be in the table
  ChannelMapSm90<Stored> maps_[kVector];  // of the channels that items last used
  int channel_;                           // that the lane's chunk of a folded row begins with
  int maps_sample_ = -1;
  int maps_channel_ = -1;
  bool asked_ = false;  // for the first item: a warp that never comes to one is not to hold it
  bool done_ = false;
};

}  // namespace upconv3d::cuda
