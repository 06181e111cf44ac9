// Elements made and kept. Text is only ever set as text, never as HTML: it comes from models and from strangers.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// Writes only what differs, so that a screen reader is told of nothing that has not changed.
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

// Keeps one child a key, in the order of the keys: what has the focus keeps it while its key is there.
export class KeyedChildren {
  #parent; #make; #parts = new Map();

  constructor(parent, make) {
    this.#parent = parent;
    this.#make = make; // (key) => a part with `.root`
  }

  // The parts of these keys; those of others are gone.
  update(keys) {
    const wanted = new Set(keys);
    for (const [key, part] of this.#parts) {
      if (!wanted.has(key)) {
        part.root.remove();
        this.#parts.delete(key);
      }
    }
    let before = this.#parent.firstElementChild;
    return keys.map((key) => {
      let part = this.#parts.get(key);
      if (!part) this.#parts.set(key, part = this.#make(key));
      if (part.root === before) before = before.nextElementSibling;
      else this.#parent.insertBefore(part.root, before);
      return part;
    });
  }
}
