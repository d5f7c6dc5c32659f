// Shows the rollouts that hold the text asked for, of the step asked for.
const text = document.getElementById("text"), step = document.getElementById("step");
const rollouts = [...document.querySelectorAll("details.rollout")];
function filter() {
  const wanted = text.value.toLowerCase();
  let shown = 0;
  for (const one of rollouts) {
    one.hidden = !((!step.value || one.dataset.step === step.value) && one.textContent.toLowerCase().includes(wanted));
    shown += !one.hidden;
  }
  document.getElementById("shown").textContent = `${shown} of ${rollouts.length} shown`;
}
text.addEventListener("input", filter);
step.addEventListener("change", filter);
filter();
