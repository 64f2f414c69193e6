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
/// Which block and warp does a piece of this work depends on timing; its result does not.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/activation.cuh"
#include "cuda/conv_transpose/after_sm90.cuh"
#include "cuda/conv_transpose/drain_sm90.cuh"
#include "cuda/conv_transpose/finalize_sm90.cuh"
#include "cuda/conv_transpose/kernel_params_sm90.cuh"

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

/// \tparam FINALIZES whether this warp is the block's one that merges moments
template <class Traits, bool FINALIZES>
class GroupNormWorker {
 public:
  using Params = KernelParams<Traits>;
  using Slab = KernelSlab<Traits>;
  using Stored = typename Traits::Stored;
  using Output = typename Traits::Output;

  static constexpr int kVector = 16 / int(sizeof(Stored));  // values of 16 bytes

  static constexpr int kItemsPerTile = Traits::ITEMS_PER_TILE;

  /// \param items this warp's barriers
  CUTLASS_DEVICE GroupNormWorker(Params const& params, ControlStorage<Traits>& control,
                                 RingBarriers<Traits::ITEM_BUFFERS>& items)
      : params_(params), control_(control), items_(items), finalizer_(params, control) {
    int const per_sample =
        Traits::QUANTIZED
            ? params.tiles_per_sample.divisor * kItemsPerTile
            : cutlass::ceil_div(Drain<Traits>::pixels(params), Traits::ITEM_POS) * params.k_tiles.divisor;
    items_per_sample_ = cutlass::FastDivmod(per_sample);
    all_items_ = per_sample * params.samples;
  }

  /// Merges moments and normalizes until nothing is left: while one item is normalized, TMA
  /// brings the next ones. A load takes long while the operands' loads keep the memory system busy.
  ///
  /// \param buffers [ITEM_BUFFERS] [BLK_K/panel channels][ITEM_POS][panel channels] Stored, swizzled
  CUTLASS_DEVICE void run(char* buffers) {
    Item items[Traits::ITEM_BUFFERS];
    int loading = 0;
    for (;;) {
      while (loading < Traits::ITEM_BUFFERS && take()) {
        start(items, buffers);
        ++loading;
      }
      bool const idle = loading == 0;
      if (!idle) {
        finish(items, buffers);
        --loading;
      }
      bool finalizes = false, all_final = true;
      if constexpr (FINALIZES) {
        finalizes = finalizer_.step();
        all_final = finalizer_.done();
      }
      if (idle && !finalizes) {
        if (done_ && all_final) return;
        __nanosleep(kPollNanoseconds);
      }
    }
  }

  /// Normalizes items that are ready now, `most` of them at most; waits for no others.
  CUTLASS_DEVICE void run_ready(char* buffers, int most) {
    Item items[Traits::ITEM_BUFFERS];
    for (int loading = 0;;) {
      while (loading < Traits::ITEM_BUFFERS && most > 0 && take()) {
        start(items, buffers);
        ++loading;
        --most;
      }
      if (loading == 0) return;
      finish(items, buffers);
      --loading;
    }
  }

 private:
  /// ITEM_POS positions x BLK_K channels of a sample. As a rule they lie next to each other in memory. With
  /// Stepped16 they are a share of a tile, since values have a meaning only together with their tile's steps.
  struct Item {
    int sample;
    int slab;      // Stepped16 only
    int channel;   // first
    int position;  // first, in [Z,P,Q]; Stepped16: within the slab, perhaps beyond it
  };

  /// Has the item held brought to the next buffer.
  CUTLASS_DEVICE void start(Item (&items)[Traits::ITEM_BUFFERS], char* buffers) {
    Item const item = take_held();
    set(items, load_.slot, item);
    load_item(item, load_.slot, buffers);
    load_.advance(Traits::ITEM_BUFFERS);
  }
  /// Normalizes the item that was started first.
  CUTLASS_DEVICE void finish(Item const (&items)[Traits::ITEM_BUFFERS], char* buffers) {
    items_.wait_full(use_);
    normalize_loaded(get(items, use_.slot), buffers + use_.slot * Traits::ITEM_BYTES);
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

  /// Whether the item held can be normalized now. Items are handed out one by one, in the order of the
  /// samples.
  CUTLASS_DEVICE bool take() {
    if (done_) return false;
    if (!asked_) ask();
    asked_ = true;
    held_ = __shfl_sync(0xffffffffu, ticket_, 0);
    return sample_ready(held_);
  }
  /// The item held, which is thereby taken.
  CUTLASS_DEVICE Item take_held() {
    Item item;
    int index, k_tile;
    item.sample = items_per_sample_.divmod(index, held_);
    ask();
    // The latest first: of a sample that does not fit L2 they are what is left there.
    index = items_per_sample_.divisor - 1 - index;
    if constexpr (Traits::QUANTIZED) {
      // Lanes search the slabs side by side: their parameters lie in constant memory, where one after the
      // other would cost more than normalizing does.
      int const tile = index / kItemsPerTile, lane = threadIdx.x % 32;
      bool const begins = lane < params_.num_slabs && tile >= control_.first_tile[lane];
      item.slab = __popc(__ballot_sync(0xffffffffu, begins)) - 1;
      int const pos_tile = params_.k_tiles.divmod(k_tile, tile - control_.first_tile[item.slab]);
      item.position = pos_tile * Traits::BLK_POS + index % kItemsPerTile * Traits::ITEM_POS;
    } else {
      item.slab = 0;
      item.position = params_.k_tiles.divmod(k_tile, index) * Traits::ITEM_POS;
    }
    item.channel = tile_channel(params_, k_tile);
    return item;
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
    int unused;
    int const sample = items_per_sample_.divmod(unused, item);
    if (sample < ready_samples_) return true;
    if (__shfl_sync(0xffffffffu, load_acquire(params_.finalized + sample), 0) < params_.merge_steps) {
      return false;
    }
    __syncwarp();
    // What the counter says was written, TMA may now read too.
    asm volatile("fence.proxy.async;" ::: "memory");
    ready_samples_ = sample + 1;
    return true;
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
      int const channel = Drain<Traits>::stored_channel(params_, item.channel, item.channel) + panel * kPanel;
      if constexpr (Traits::QUANTIZED) {
        Slab const& slab = params_.slabs[item.slab];
        // An im2col load must begin inside the slab, also that of an item which lies beyond it whole.
        int q, p;
        int const z = slab.height.divmod(p, slab.width.divmod(q, min(item.position, slab.positions - 1)));
        cute::SM90_TMA_LOAD_IM2COL_5D::copy(&slab.item, barrier, to + panel * (Traits::ITEM_POS * 128),
                                            channel, q, p, z, item.sample, std::uint16_t(0), std::uint16_t(0),
                                            std::uint16_t(0));
      } else {
        cute::SM90_TMA_LOAD_3D::copy(
            &params_.item, barrier, std::uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST),
            to + panel * (Traits::ITEM_POS * 128), channel, item.position, item.sample);
      }
    }
  }

  /// y of an item that load_item has brought. One branch, here: these warps are bound by what they issue.
  CUTLASS_DEVICE void normalize_loaded(Item const& item, char const* buffer) {
    Activation const after = params_.after.kind;
    if (after == Activation::kNone) {
      normalize_loaded<NoActivation>(item, buffer);
    } else if (after == Activation::kRelu) {
      normalize_loaded<ReluActivation>(item, buffer);
    } else {
      normalize_loaded<SlopeActivation>(item, buffer);
    }
  }
  template <class After>
  CUTLASS_DEVICE void normalize_loaded(Item const& item, char const* buffer) {
    constexpr int kChunks = Traits::BLK_K / kVector;  // of a position
    constexpr int kRows = 32 / kChunks;               // positions that a warp takes at once
    // Positions of a lane that are worked on side by side: shared memory answers late while wgmma reads it.
    constexpr int kBatch = 4;
    static_assert(Traits::ITEM_POS % (kRows * kBatch) == 0 && Traits::ITEM_POS <= 32);
    int lane = threadIdx.x % 32;
    asm volatile("" : "+r"(lane));  // as in StagedTile::stage_half
    int const chunk = lane % kChunks;
    int const channel = item.channel + chunk * kVector;
    bool const inside = channel < channel_end(params_, item.channel);
    if (inside) load_maps(item.sample, channel);
    float slope[kVector];  // not in maps_, which are kept while moments are merged
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) {
      bool const used = std::is_same_v<After, SlopeActivation> && inside;
      slope[i] = used ? activation_parameter<Output>(params_.after, channel + i) : 0.f;
    }
    int count, pixel;  // a lane finds one position's place, for all
    float step[kVector];
    if constexpr (Traits::QUANTIZED) {
      Slab const& slab = params_.slabs[item.slab];
      count = inside ? slab.positions - item.position : 0;
      pixel = pixel_of(params_, slab, min(item.position + lane, slab.positions - 1));
      if (count > 0) {
        load_steps(item.sample, slab.first_moment + item.position / Traits::STAGED_POS, channel, step);
      }
    } else {
      count = inside ? Drain<Traits>::pixels(params_) - item.position : 0;
    }
    Output* const to =
        params_.y + item.sample * std::int64_t(Drain<Traits>::pixels(params_)) * params_.k + channel;
    char const* const panel = buffer + chunk / 8 * (Traits::ITEM_POS * 128);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = lane / kChunks; first - lane / kChunks < Traits::ITEM_POS; first += kRows * kBatch) {
      uint4 in[kBatch];
      int row_pixel[kBatch];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        int const row = first + i * kRows;
        row_pixel[i] = Traits::QUANTIZED ? __shfl_sync(0xffffffffu, pixel, row) : item.position + row;
        in[i] = *reinterpret_cast<uint4 const*>(panel + row * 128 + ((chunk % 8) ^ (row % 8)) * 16);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        store_normalized<After>(in[i], step, slope, to + std::int64_t(row_pixel[i]) * params_.k,
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
  cutlass::FastDivmod items_per_sample_;
  int all_items_;                         // of all samples and blocks
  int ticket_ = 0;                        // lane 0: the item handed out last, perhaps on its way
  int held_ = 0;                          // the same, for all lanes
  int ready_samples_ = 0;                 // known to be in the table
  ChannelMapSm90<Stored> maps_[kVector];  // of the channels that items last used
  int maps_sample_ = -1;
  int maps_channel_ = -1;
  bool asked_ = false;  // for the first item: a warp that never comes to one is not to hold it
  bool done_ = false;
};

}  // namespace upconv3d::cuda
