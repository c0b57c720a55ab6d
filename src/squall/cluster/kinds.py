"""Messages by the names that the fault language has for them."""

from squall.wire import messages

KIND_OF: dict[type, str] = {
    messages.Push: "push",
    messages.Pushed: "push.reply",
    messages.Fetch: "fetch",
    messages.Fetched: "fetch.reply",
    messages.Ask: "ask",
    messages.Lease: "ask.reply",
    messages.Leave: "ask.reply",
    messages.Refuse: "refuse",
    messages.Refused: "refuse.reply",
    messages.Goodbye: "goodbye",
    messages.Recall: "recall",
    messages.Diverged: "refuse.reply",
    messages.Hold: "hold",
    messages.Held: "hold.reply",
    messages.Release: "release",
    messages.Released: "release.reply",
    messages.Returned: "returned",
    messages.Inquire: "inquire",
    messages.Books: "inquire.reply",
    messages.Resume: "resume",
}
