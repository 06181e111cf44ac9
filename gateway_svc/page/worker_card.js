// One worker: how it is, and its pools of blocks.
import { BlockMap, countKinds } from "./block_map.js";
import { CacheSlider } from "./cache_slider.js";
import { element, KeyedChildren, setText } from "./elements.js";

export class WorkerCard {
  #state; #problem; #pools; #slider;

  // key: a KeptKey.
  constructor(address, key) {
    this.#state = element("p");
    this.#problem = element("p", { class: "error" });
    const pools = element("div");
    this.#pools = new KeyedChildren(pools, (name) => new Pool(name));
    this.#slider = new CacheSlider(address, key);
    this.#slider.root.hidden = true;
    this.root = element("article", { class: "worker", "aria-label": `Worker ${address}` }, element("h3", {}, `Worker ${address}`), this.#state, this.#problem, this.#slider.root, pools);
  }

  // chosen: blocks of the requests that are pointed at, { worker: address, device: Set, host: Set }.
  // isDemo: its cache may be made smaller.
  show(worker, copies, chosen, isDemo) {
    setText(this.#state, `${worker.state}, ${worker.model}: ${worker.running} running, ${worker.away} waiting to come back`);
    setText(this.#problem, worker.problem);
    const device = worker.pools.find((pool) => !pool.on_host);
    if (isDemo && device) this.#slider.show(device);
    const pools = this.#pools.update(worker.pools.map((pool) => (pool.on_host ? "host" : "device")));
    pools.forEach((pool, place) => {
      const name = worker.pools[place].on_host ? "host" : "device";
      const mine = chosen.worker === worker.address ? chosen[name] : new Set();
      const hasMark = (block) => name === "device" && copies.has(worker.address, block);
      pool.show(worker, worker.pools[place], hasMark, mine);
    });
  }
}

class Pool {
  #name; #text; #map = new BlockMap();

  constructor(name) {
    this.#name = name;
    this.#text = element("p");
    this.root = element("div", {}, this.#text, this.#map.root);
  }

  show(worker, pool, hasMark, chosen) {
    const { used, shared, cached, withheld } = countKinds(pool.blocks);
    this.root.hidden = !pool.blocks.length; // a host that holds nothing
    const of = this.#name === "device" && pool.blocks.length < pool.num_blocks ? `the first ${pool.blocks.length} of ${pool.num_blocks}` : pool.num_blocks;
    const kept = cached ? `, ${cached} free with content kept` : "";
    const without = withheld ? `, ${withheld} withheld` : "";
    const text = this.#name === "host"
      ? `Host: ${used + shared} of ${of} blocks hold what was swapped out`
      : `Cache: ${used + shared} of ${of} blocks of ${worker.block_size} tokens in use, ${shared} of them shared${kept}${without}`;
    setText(this.#text, text);
    if (this.#map.root.getAttribute("aria-label") !== text) this.#map.root.setAttribute("aria-label", text);
    this.#map.show(pool.blocks, hasMark, chosen);
  }
}
