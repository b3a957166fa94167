#include "races.h"

#include <algorithm>

namespace moe::host {
namespace {

constexpr int kMaxStoring = 16, kMaxBarriers = 256;  // entries of a clock

void join(Clock& into, const Clock& other) {
  uint32_t* a = into.data();
  const uint32_t* b = other.data();
  const size_t n = into.size();
  for (size_t i = 0; i < n; ++i) a[i] = a[i] < b[i] ? b[i] : a[i];
}
void raise(uint32_t& entry, uint32_t to) { entry = std::max(entry, to); }

}  // namespace

Races::Races(int blocks, int threads, uint32_t base, uint32_t bytes, Report report)
    : blocks_(blocks),
      threads_(threads),
      lanes_(blocks * threads),
      first_store_(lanes_ + lanes_ / 32 + (lanes_ + 127) / 128),
      first_barrier_(first_store_ + kMaxStoring),
      half_(first_barrier_ + kMaxBarriers),
      base_(base),
      bytes_(bytes),
      report_(std::move(report)),
      cells_(static_cast<size_t>(blocks) * ((bytes + 3) / 4)),
      all_(static_cast<size_t>(lanes_)),
      warps_(static_cast<size_t>(lanes_ / 32)),
      products_done_(static_cast<size_t>((lanes_ + 127) / 128)) {
  const auto nothing = std::make_shared<const Clock>(2 * static_cast<size_t>(half_), 0u);
  for (Lane& lane : all_) lane.clock = nothing;
}

int Races::store_entry(int lane) {
  const auto found = std::find(storing_.begin(), storing_.end(), lane);
  const int at = static_cast<int>(found - storing_.begin());
  if (found == storing_.end()) storing_.push_back(lane);
  if (at >= kMaxStoring) report_("more threads issue bulk stores than the race detector has room for");
  return first_store_ + at;
}

// --- what a lane knows ----------------------------------------------------------------------------------------------------------------
Races::Event Races::now(int lane, bool several) const {
  return {static_cast<int16_t>(lane), several, true, all_[lane].count, warps_[lane / 32].syncs};
}

bool Races::known(int lane, const Event& event) const {
  const Clock& clock = *all_[lane].clock;
  if (event.actor >= lanes_) {
    if (event.actor == product_entry(lane)) return event.count <= products_done_[lane / 128];
    return clock[event.actor] >= event.count;
  }
  const int warp = event.actor / 32;
  if (warp == lane / 32) {
    if (event.syncs < warps_[warp].syncs || (event.actor == lane && !event.several)) return true;
  } else if (clock[warp_entry(warp)] > event.syncs) {
    return true;
  }
  return !event.several && clock[event.actor] >= event.count;
}

bool Races::is_fenced(int lane, const Event& event) const {
  const Clock& clock = *all_[lane].clock;
  if (event.actor >= lanes_) return clock[half_ + event.actor] >= event.count;
  const int warp = event.actor / 32;
  if (warp == lane / 32 && event.syncs < all_[lane].fenced_syncs) return true;
  if (clock[half_ + warp_entry(warp)] > event.syncs) return true;
  if (event.several) return false;
  return event.actor == lane ? event.count <= all_[lane].fenced : clock[half_ + event.actor] >= event.count;
}

void Races::fence(int lane) {
  Lane& me = all_[lane];
  Memo& memo = warps_[lane / 32].fenced;
  if (memo.from != me.clock) {
    Clock all = *me.clock;
    std::copy_n(all.begin(), half_, all.begin() + half_);
    memo.from = me.clock;
    memo.result = std::make_shared<const Clock>(std::move(all));
  }
  me.clock = memo.result;
  me.fenced = me.count++;
  me.fenced_syncs = warps_[lane / 32].syncs;
  me.clean = true;
}

void Races::warp_sync(int lane) {
  Lane* const mine = &all_[lane / 32 * 32];
  Warp& warp = warps_[lane / 32];
  bool same = true, clean = true;
  for (int l = 1; l < 32; ++l) same = same && mine[l].clock == mine[0].clock;
  if (!same) {
    Clock all = *mine[0].clock;
    for (int l = 1; l < 32; ++l) {
      if (mine[l].clock != mine[l - 1].clock) join(all, *mine[l].clock);
    }
    const auto result = std::make_shared<const Clock>(std::move(all));
    for (int l = 0; l < 32; ++l) mine[l].clock = result;
  }
  ++warp.syncs;
  uint32_t fenced = 0;
  for (int l = 0; l < 32; ++l) {
    clean = clean && mine[l].clean;
    raise(fenced, mine[l].fenced_syncs);
  }
  for (int l = 0; l < 32; ++l) mine[l].fenced_syncs = clean ? warp.syncs : fenced;
}

void Races::sync_all() {
  Clock all = *all_[0].clock;
  for (int l = 0; l < lanes_; ++l) {
    if (l > 0 && all_[l].clock != all_[l - 1].clock) join(all, *all_[l].clock);
    raise(all[l], all_[l].count++);
    raise(all[half_ + l], all_[l].fenced);
    raise(all[warp_entry(l / 32)], warps_[l / 32].syncs);
    raise(all[half_ + warp_entry(l / 32)], all_[l].fenced_syncs);
    raise(all[product_entry(l)], products_done_[l / 128]);
  }
  const auto result = std::make_shared<const Clock>(std::move(all));
  for (Lane& lane : all_) lane.clock = result;
}

// --- barriers -------------------------------------------------------------------------------------------------------------------------
int Races::new_barrier(int block, uint32_t address) {
  if (barriers_.size() == kMaxBarriers) report_("more barriers than the race detector has room for");
  const Clock nothing(2 * static_cast<size_t>(half_), 0u);
  barriers_.push_back({block, address, nothing, std::make_shared<const Clock>(nothing)});
  return static_cast<int>(barriers_.size()) - 1;
}

void Races::arrive(int lane, int barrier) {
  Lane& me = all_[lane];
  Clock& into = barriers_[barrier].gathering;
  join(into, *me.clock);
  raise(into[lane], me.count++);
  raise(into[half_ + lane], me.fenced);
  raise(into[warp_entry(lane / 32)], warps_[lane / 32].syncs);
  raise(into[half_ + warp_entry(lane / 32)], me.fenced_syncs);
  raise(into[product_entry(lane)], products_done_[lane / 128]);
}

void Races::complete(int barrier, uint32_t phase) {
  BarrierState& at = barriers_[barrier];
  at.gathering[barrier_entry(barrier)] = phase;
  at.last = std::make_shared<const Clock>(at.gathering);
  std::fill(at.gathering.begin(), at.gathering.end(), 0u);
}

void Races::acquire(int lane, int barrier) {
  Lane& me = all_[lane];
  const SharedClock& with = barriers_[barrier].last;
  Memo& memo = warps_[lane / 32].acquired;
  if (memo.from != me.clock || memo.with != with) {
    Clock all = *me.clock;
    join(all, *with);
    memo.from = me.clock;
    memo.with = with;
    memo.result = std::make_shared<const Clock>(std::move(all));
  }
  me.clock = memo.result;
}

// --- copies and products --------------------------------------------------------------------------------------------------------------
void Races::copy_in(int lane, int block, uint32_t address, uint32_t bytes, int barrier, uint32_t phase, bool ordinary) {
  record(lane, block, address, bytes, true, event_of(barrier_entry(barrier), phase, ordinary));
}

void Races::copy_out(int lane, uint32_t address, uint32_t bytes, uint32_t group) {
  record(lane, lane / threads_, address, bytes, false, event_of(store_entry(lane), group, false));
}

void Races::stores_done(int lane, uint32_t done) {
  Lane& me = all_[lane];
  const int entry = store_entry(lane);
  if ((*me.clock)[entry] >= done) return;
  Clock all = *me.clock;
  all[entry] = done;
  me.clock = std::make_shared<const Clock>(std::move(all));
}

void Races::operand(int lane, uint32_t address, uint32_t bytes, uint32_t group) {
  record(lane, lane / threads_, address, bytes, false, event_of(product_entry(lane), group, false));
}

void Races::products_done(int lane, uint32_t done) { products_done_[lane / 128] = done; }

// --- memory ---------------------------------------------------------------------------------------------------------------------------
void Races::touch(int lane, int block, uint32_t address, uint32_t bytes, bool write, bool several) {
  if (write) all_[lane].clean = false;
  if (write && several) {
    for (int l = lane / 32 * 32; l < lane / 32 * 32 + 32; ++l) all_[l].clean = false;
  }
  record(lane, block, address, bytes, write, now(lane, several));
}

void Races::record(int lane, int block, uint32_t address, uint32_t bytes, bool write, const Event& event) {
  const uint32_t offset = address - base_;
  Cell* const cells = &cells_[static_cast<size_t>(block) * ((bytes_ + 3) / 4)];
  for (uint32_t at = offset / 4; at <= (offset + bytes - 1) / 4; ++at) {
    Cell& cell = cells[at];
    const uint8_t halves = write && bytes == 2 ? 1 << offset / 2 % 2 : 0;
    // Two lanes of a warp may write a word's halves between two synchronisations.
    const bool other_half = halves != 0 && cell.halves != 0 && (cell.halves & halves) == 0 && event.actor < lanes_ && cell.write.actor >= 0 &&
                            cell.write.actor < lanes_ && cell.write.actor / 32 == event.actor / 32 && cell.write.syncs == event.syncs;
    if (cell.write.actor >= 0 && !other_half) {
      if (!known(lane, cell.write)) conflict(block, base_ + 4 * at, cell.write, true, event, write, false);
      if (!event.ordinary && cell.write.ordinary && !is_fenced(lane, cell.write)) {
        conflict(block, base_ + 4 * at, cell.write, true, event, write, true);
      }
    }
    if (!write) {
      note_read(lane, cell, event);
      continue;
    }
    while (cell.readers >= 0) {
      const int32_t first = cell.readers;
      Reader& read = readers_[first];
      if (!known(lane, read.event)) conflict(block, base_ + 4 * at, read.event, false, event, true, false);
      cell.readers = read.next;
      read.next = free_reader_;
      free_reader_ = first;
    }
    cell.write = event;
    if (other_half) cell.write.several = true;
    cell.halves = other_half ? 0 : halves;
  }
}

// Readers that this one knows of need not be remembered: who knows this one knows them. Several lanes of a warp count as one.
void Races::note_read(int lane, Cell& cell, const Event& event) {
  int32_t mine = -1;
  for (int32_t* at = &cell.readers; *at >= 0;) {
    Reader& reader = readers_[*at];
    Event& read = reader.event;
    if (event.actor < lanes_ && read.actor < lanes_ && read.actor / 32 == event.actor / 32 && read.syncs == event.syncs &&
        (read.actor != event.actor || read.several)) {
      read.several = true;
      mine = *at;
      at = &reader.next;
    } else if (read.actor == event.actor || known(lane, read)) {
      const int32_t gone = *at;
      *at = reader.next;
      reader.next = free_reader_;
      free_reader_ = gone;
    } else {
      at = &reader.next;
    }
  }
  if (mine >= 0) return;
  int32_t added = free_reader_;
  if (added >= 0) {
    free_reader_ = readers_[added].next;
  } else {
    added = static_cast<int32_t>(readers_.size());
    readers_.emplace_back();
  }
  readers_[added] = {event, cell.readers};
  cell.readers = added;
}

void Races::conflict(int block, uint32_t address, const Event& first, bool first_writes, const Event& second, bool second_writes, bool unfenced) {
  const auto access = [this](const Event& event, bool writes) { return (writes ? "write by " : "read by ") + describe(event); };
  report_("race on shared address " + std::to_string(address) + " of block " + std::to_string(block) + ": the " + access(first, first_writes) +
          (unfenced ? " is not fenced" : " is not ordered") + " before the " + access(second, second_writes));
}

std::string Races::describe(const Event& event) const {
  // As run_roles (mma_sm90.h) gives them out.
  const auto role = [&](int lane) {
    static const char* const kRoles[] = {"the loader", "the store warp of consumer 0", "the store warp of consumer 1", "the fourth warp"};
    const int warp = lane % threads_ / 32;
    return warp < 4 ? std::string(kRoles[warp]) : "warp " + std::to_string(warp % 4) + " of consumer " + std::to_string(warp / 4 - 1);
  };
  if (event.actor < lanes_) return role(event.actor) + (event.several ? "" : ", lane " + std::to_string(event.actor % 32));
  if (event.actor >= first_barrier_) {
    const BarrierState& barrier = barriers_[event.actor - first_barrier_];
    return std::string(event.ordinary ? "gathering" : "the copy engine") + " for the barrier at " + std::to_string(barrier.address);
  }
  if (event.actor >= first_store_) return "a bulk store of " + role(storing_[event.actor - first_store_]);
  return "products of consumer " + std::to_string((event.actor - lanes_ - warps()) % (threads_ / 128) - 1);
}

}  // namespace moe::host
