// Light or dark: as the system has it, or as it was chosen here last.
const KEPT_AS = "octavo-theme";

export function startTheme(select) {
  select.value = kept() ?? "system";
  const apply = () => { document.documentElement.dataset.theme = select.value; };
  select.addEventListener("change", () => {
    apply();
    keep(select.value);
  });
  apply();
}

// A browser may refuse to keep anything; then the choice holds for this visit.
function kept() {
  try { return localStorage.getItem(KEPT_AS); } catch { return null; }
}

function keep(value) {
  try { localStorage.setItem(KEPT_AS, value); } catch { /* as said */ }
}
