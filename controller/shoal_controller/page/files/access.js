// Who asks: the token, typed once and kept for this tab, and the role that it has. Called by main.js.

import { element, foreign, setText, visible } from "./elements.js";
import { ABOUT, Problem, get, keepToken, token } from "./rest.js";

const NOT_IN_A_HEADER = /[^\x20-\x7e\xa0-\xff]/u; // a browser sends no request with it, and says nothing

let about = null;

/** What the controller has last said of itself and of the caller. */
export const known = () => about;

/** Whether the caller may change jobs. */
export const mayOperate = () => about !== null && about.role !== "view";

/** Ask who we are, with a form for a token until one is let in. Resolves when the page may begin. */
export async function letIn(place) {
  let wrong = token() ? "The token that this tab has kept is not valid any more." : "";
  for (;;) {
    try {
      about = await get(ABOUT);
      showCaller();
      return about;
    } catch (error) {
      if (!(error instanceof Problem) || error.status === 0 || error.status >= 500) throw error;
      if (error.status === 429 || error.status === 403) wrong = error.message;
      else if (error.status !== 401) throw error;
      const had = token();
      keepToken("");
      await asked(place, had ? wrong || error.message : "");
      wrong = "";
    }
  }
}

function asked(place, problem) {
  const input = element("input", {
    id: "token", type: "password", autocomplete: "off", required: true, spellcheck: "false",
    "aria-describedby": "token-problem token-note", "aria-invalid": problem ? "true" : null,
  });
  const note = element("p", { id: "token-problem", class: "problem", role: "alert" }, problem);
  return new Promise((resolve) => {
    const submit = (event) => {
      event.preventDefault();
      const strange = NOT_IN_A_HEADER.exec(input.value.trim());
      if (strange) return setText(note, `No token has the character ${visible(strange[0])} in it. Copy it once more.`);
      keepToken(input.value.trim());
      return resolve();
    };
    place.replaceChildren(
      element(
        "form", { class: "card token", onsubmit: submit },
        element("h1", {}, "This controller asks for a token"),
        element("label", { for: "token" }, "Token"),
        input,
        note,
        element("p", { id: "token-note", class: "quiet" },
          "It is kept for this tab only, and sent to this controller only. `shoal run` writes one to .shoal/token."),
        element("button", { type: "submit", class: "primary" }, "Show the jobs"),
      ),
    );
    input.focus();
  });
}

function showCaller() {
  const place = document.getElementById("caller");
  const who = about.token ? [foreign(about.token), ` · ${about.role}`] : [about.token_required ? about.role : "no token needed"];
  const leave = element("button", { type: "button", class: "plain", onclick: forget }, "Forget the token");
  place.replaceChildren(element("span", { class: "quiet" }, ...who), ...(token() ? [leave] : []));
}

function forget() {
  keepToken("");
  location.reload();
}
