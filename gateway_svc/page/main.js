// Starts the page: each part is given the elements it writes to.
import { LivePanel } from "./live_panel.js";
import { Playground } from "./playground.js";
import { startTheme } from "./theme.js";

const named = (id) => document.getElementById(id);

startTheme(named("theme"));
new Playground(named("request"), named("stop"), named("request-status"), named("answers"), named("probabilities"));
if (document.documentElement.dataset.livePanel === "on") new LivePanel(named);
