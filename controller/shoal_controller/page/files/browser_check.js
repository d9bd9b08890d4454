// Says what an old browser lacks, in the words that every browser understands (no modules, no arrows). Runs before all
// else; the page itself is modules, which such a browser does not load.
(function () {
  var needs = [
    ["JavaScript modules", "noModule" in document.createElement("script")],
    ["streams of requests (fetch with ReadableStream)", window.fetch && window.ReadableStream && window.TextDecoderStream],
    ["AbortSignal.any", window.AbortSignal && AbortSignal.any && AbortSignal.timeout],
    ["dialogs", !!window.HTMLDialogElement],
    ["session storage", (function () { try { return !!window.sessionStorage; } catch (error) { return false; } })()]
  ];
  var missing = [];
  for (var i = 0; i < needs.length; i++) if (!needs[i][1]) missing.push(needs[i][0]);
  if (!missing.length) return;
  window.shoalLacks = missing;
  document.addEventListener("DOMContentLoaded", function () {
    var place = document.getElementById("view");
    place.textContent = "This browser lacks " + missing.join(", ") + ", which this page needs. Use a Chromium, Firefox or " +
      "Safari of 2024 or later, or the command: shoal top.";
    place.className = "sentence";
  });
})();
