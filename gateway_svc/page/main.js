// Starts the page: each part is given the elements it writes to.
import { KeptKey } from "./kept_key.js";
import { LivePanel } from "./live_panel.js";
import { Playground } from "./playground.js";
import { startTheme } from "./theme.js";

const named = (id) => document.getElementById(id);

const key = new KeptKey();

startTheme(named("theme"));
const playground = new Playground(key, named("request"), named("stop"), named("request-status"), named("answers"), named("probabilities"));
if (document.documentElement.dataset.livePanel === "on") new LivePanel(named, key, () => playground.learnModels());
