// The console, and the Copy buttons. Everything else on these pages works without a script.
"use strict";

const LOG_LINES = 50; // kept per socket
const SHOWN_HEADERS = /^(ratelimit|x-ratelimit|retry-after|www-authenticate)/;
const OK = 200;
const key = document.querySelector("input#key");

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", () => copy(button));
}

// After the page with a new key, a reload would send the form again and make one more key.
const address = document.querySelector("[data-address]");
if (address) history.replaceState(null, "", address.dataset.address);

// A double click is one click: a form is not sent twice within two seconds.
let patience = 0;
addEventListener("submit", (event) => {
  if (event.timeStamp < patience) event.preventDefault();
  else if (event.target.method === "post") patience = event.timeStamp + 2000;
});

/** Copy the text of the element that the button names, and say so on the button. */
async function copy(button) {
  const source = document.getElementById(button.dataset.copy);
  getSelection().selectAllChildren(source);
  try {
    await navigator.clipboard.writeText(source.textContent);
  } catch {
    document.execCommand("copy"); // without https, browsers offer nothing else
  }
  rename(button, "Copied");
  setTimeout(() => rename(button, "Copy"), 2000);
}

function rename(button, word) {
  button.ariaLabel = button.ariaLabel.replace(button.textContent, word);
  button.textContent = word;
}

/** Call an endpoint with the key of the page and show what comes back. */
async function ask(card, path) {
  const started = performance.now();
  card.querySelector(".answer").hidden = false;
  card.querySelector(".answer .status").textContent = "Asking…";
  const headers = key.value && !("public" in card.dataset) ? { "X-API-Key": key.value.trim() } : {};
  let response, body;
  try {
    response = await fetch(path, { headers, credentials: "omit", cache: "no-store" });
    body = await response.text();
  } catch {
    const reason = "The server cannot be reached, or the key has characters that no header can carry.";
    return showAnswer(card, "No answer", reason, false);
  }
  const duration = Math.round(performance.now() - started);
  const lines = [...response.headers].filter(([name]) => SHOWN_HEADERS.test(name));
  const head = lines.map(([name, value]) => `${name}: ${value}\n`).join("");
  const status = `${response.status} ${response.statusText} in ${duration} ms`;
  showAnswer(card, status, `${head}${head && "\n"}${pretty(body)}`, response.status === OK);
}

/** Put a status and a text into the answer of a card. */
function showAnswer(card, status, text, good) {
  const answer = card.querySelector(".answer");
  const line = answer.querySelector(".status");
  line.textContent = status;
  line.classList.toggle("good", good);
  line.classList.toggle("bad", !good);
  answer.querySelector("pre").textContent = text;
}

function pretty(body) {
  try {
    return JSON.stringify(JSON.parse(body), null, 2);
  } catch {
    return body;
  }
}

/** One WebSocket's card: connect, disconnect, send, and a log of what was said. */
class Line {
  constructor(card) {
    this.card = card;
    this.button = card.querySelector("[data-connect]");
    this.status = card.querySelector(".status");
    this.log = card.querySelector(".log");
    this.button.addEventListener("click", () => {
      if (this.opened) this.socket.close();
      else if (this.socket) this.cancel();
      else this.connect();
    });
    card.querySelector("form")?.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(event.target.querySelector("input").value);
    });
  }

  connect() {
    const query = this.card.id === "time" ? `?api_key=${encodeURIComponent(key.value.trim())}` : "";
    const origin = location.origin.replace("http", "ws");
    this.card.querySelector(".answer").hidden = true;
    this.opened = false;
    this.say("Connecting…", "Disconnect");
    this.socket = new WebSocket(`${origin}${this.card.dataset.path}${query}`);
    this.socket.onopen = () => {
      this.opened = true;
      this.say("Connected", "Disconnect", "good");
    };
    this.socket.onmessage = ({ data }) => this.note(data, "in");
    this.socket.onclose = ({ code }) => this.closed(code);
  }

  cancel() {
    this.socket.onclose = null;
    this.socket.close();
    this.socket = null;
    this.say("Not connected", "Connect");
  }

  send(text) {
    if (!this.socket) this.connect();
    const deliver = () => {
      this.socket.send(text);
      this.note(text, "out");
    };
    if (this.opened) deliver();
    else this.socket.addEventListener("open", deliver, { once: true });
  }

  closed(code) {
    const reasons = {
      1001: ": the server is going away",
      1006: ": the connection broke",
      1008: ": the key was revoked",
      1009: ": the message was too large",
    };
    this.socket = null;
    if (this.opened) {
      this.opened = false;
      return this.say(`Disconnected, code ${code}${reasons[code] ?? ""}`, "Connect");
    }
    const question =
      "Refused. A browser does not tell why, so here is what /protected/test says. " +
      "If that is 200, too many sockets of this key are open.";
    this.say(this.card.id === "time" ? question : "Refused", "Connect", "bad");
    if (this.card.id === "time") ask(this.card, "/api/v1/protected/test");
  }

  say(status, action, mood = "") {
    this.status.textContent = status;
    this.status.className = `status needs-script ${mood}`;
    this.button.textContent = action;
  }

  note(text, direction) {
    const entry = document.createElement("p");
    entry.className = direction;
    entry.textContent = text;
    this.log.hidden = false;
    this.log.append(entry);
    while (this.log.childElementCount > LOG_LINES) this.log.firstElementChild.remove();
    this.log.scrollTop = this.log.scrollHeight;
  }
}

if (key) {
  const show = document.getElementById("show");
  show.addEventListener("click", () => {
    const shown = key.type === "password";
    key.type = shown ? "text" : "password";
    show.textContent = shown ? "Hide" : "Show";
  });
  for (const card of document.querySelectorAll(".endpoint")) {
    card.querySelector("[data-try]").addEventListener("click", () => ask(card, card.dataset.path));
  }
  for (const card of document.querySelectorAll(".socket")) new Line(card);
}
