// The panes of the page: classes made with the app, with a `node` for the page and `show`, `focus` and `stop`.

import { ChatPane } from "./chat_pane.js";
import { ImagesPane } from "./images_pane.js";

export const PANES = { chat: ChatPane, images: ImagesPane };
